"""Selects the groups that serve a request, by predicted time. Selects a generation group and, if it is faster, a
prefill group."""
