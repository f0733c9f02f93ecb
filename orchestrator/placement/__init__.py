"""Selects the groups that serve a request, by predicted time."""
