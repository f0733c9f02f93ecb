"""Residency policies that store KV in 4 bits per element."""
