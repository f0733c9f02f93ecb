"""Holds keys and values in memory, and hands out views of them."""
