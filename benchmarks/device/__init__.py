"""Modules of benchmarks.cuda: models of real shapes, rates of a machine, and the measurements to compare with them."""
