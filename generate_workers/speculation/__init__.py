"""Speculative decoding: drafts of the next tokens are made cheaply, and one step of the model verifies them over all
KV."""
