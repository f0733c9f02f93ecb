"""Starts, watches, replaces and ends the workers of groups, wherever they run."""
