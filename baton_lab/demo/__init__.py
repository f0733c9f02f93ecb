"""Demonstration of a running cluster (`make demo`)."""
