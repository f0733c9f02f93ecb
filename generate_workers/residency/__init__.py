"""Storage of a generation group's KV, and its access by steps: a port, and one file for each policy."""
