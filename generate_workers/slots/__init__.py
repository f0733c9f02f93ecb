"""Own the slots of a generation group: leases, memory, and the writers and readers inside each slot."""
