"""Policies where KV lives in home memory, and a device computes with what it has of it: picks, or what is kept."""
