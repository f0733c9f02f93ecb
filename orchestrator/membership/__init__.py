"""Knows the groups of workers, which of them may get work, and what prefill ranks have before them."""
