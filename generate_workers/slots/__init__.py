"""Owns the slots of a generation group: leases, memory, and who may write."""
