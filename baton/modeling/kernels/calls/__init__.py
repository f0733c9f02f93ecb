"""Python interface to the C++ kernels: libraries, argument checks and operators."""
