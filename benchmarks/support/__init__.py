"""Helpers that several benchmarks share: pairs, reports, loads, rates."""
