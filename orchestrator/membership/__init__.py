"""Tracks the groups of workers, which groups may get work, and the unfinished jobs of the prefill ranks."""
