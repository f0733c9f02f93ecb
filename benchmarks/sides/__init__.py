"""Runs one side of a comparison in a process of its own."""
