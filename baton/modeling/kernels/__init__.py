"""C++ kernels, which are built when Baton is installed. If they are not built, torch's operators are used instead."""
