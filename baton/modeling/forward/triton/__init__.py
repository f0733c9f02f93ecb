"""Forward pass on GPUs with Triton kernels, over KV in pages."""
