"""Draws the results of benchmarks."""
