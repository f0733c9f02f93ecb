"""Simulated work of groups: the batch of a generation group, and the jobs of a prefill group."""
