"""Bases for key selection: low-rank projections of queries and keys, which are fitted once and stored in a file."""
