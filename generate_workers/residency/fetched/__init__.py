"""Policies that store KV in host memory, and fetch selected keys and values to a device that attends to them."""
