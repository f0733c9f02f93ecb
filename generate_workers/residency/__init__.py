"""Where the KV of a generation group lives, and how a step gets at it: a port, and one file for each policy."""
