"""Helpers that several benchmarks use: alternating measurements, reports, loads, and rates of the hardware."""
