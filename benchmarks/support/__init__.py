"""Holds what several benchmarks share: pairs, reports, loads, rates."""
