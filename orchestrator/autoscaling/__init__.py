"""Decides how many groups of prefill and generation workers are needed, and explains each decision. Does not change
groups itself."""
