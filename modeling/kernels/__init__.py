"""Kernels in C++: one file each, built at first use; torch's own serve where they cannot be."""
