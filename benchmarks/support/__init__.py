"""Helpers that several benchmarks share: pairs of measurements, reports, loads, rates."""
