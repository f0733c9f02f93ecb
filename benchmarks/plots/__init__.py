"""Draws what benchmarks measured."""
