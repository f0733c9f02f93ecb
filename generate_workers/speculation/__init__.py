"""Speculative decoding: cheap drafts of the next tokens, verified by one step of the model over all KV."""
