"""Sides of comparisons, each of which runs in a separate process."""
