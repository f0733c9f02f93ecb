"""Triton kernels that draw the next tokens of a batch from logits. `sampler` contains the operator."""
