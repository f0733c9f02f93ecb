"""The forward pass over KV in pages by kernels in Triton, as GPUs run it."""
