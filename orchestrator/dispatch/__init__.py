"""Runs one attempt at a request: leases, prefill, and the stream of tokens."""
