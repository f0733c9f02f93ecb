"""Chooses the groups of a request by predicted time."""
