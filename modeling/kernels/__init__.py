"""Kernels in C++: one file each, built at first use; where they cannot be built, torch's own take their place."""
