"""The forward pass on GPUs, over KV in pages, by Triton kernels."""
