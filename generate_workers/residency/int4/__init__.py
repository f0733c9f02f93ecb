"""Policies that store KV in 4 bits per channel."""
