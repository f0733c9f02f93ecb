"""Residency policies that store KV in host memory. They select keys for attention, and fetch only the selected keys and
values to the device."""
