"""Slots of a generation group: leases, memory, and the writers and readers inside each slot."""
