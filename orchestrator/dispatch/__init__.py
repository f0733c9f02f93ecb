"""Runs one attempt at a request: leases slots, runs the prefill, and reads the stream of tokens."""
