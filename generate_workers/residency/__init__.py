"""Hold the KV of a generation group, and hand it to steps: a port, and one file for each policy."""
