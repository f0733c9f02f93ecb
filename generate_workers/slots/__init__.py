"""Slots of a generation group: leases on slots, their memory, and the writers and readers of this memory."""
