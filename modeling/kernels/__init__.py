"""Kernels in C++, built when Baton is installed; where they are not, torch's operators take their place."""
