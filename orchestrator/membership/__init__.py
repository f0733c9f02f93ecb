"""Knows the groups of workers, which of them may get work, and which jobs prefill ranks have before them."""
