"""Calls of the kernels in C++: libraries, checked arguments and operators."""
