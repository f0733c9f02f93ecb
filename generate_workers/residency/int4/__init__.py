"""Keeps KV in 4 bits."""
