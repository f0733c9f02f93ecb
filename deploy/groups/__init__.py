"""Starts, watches, replaces and ends the workers of groups, as child processes or on Ray."""
