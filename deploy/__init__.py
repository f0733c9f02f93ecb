"""Bringing Baton up: command line, configuration, processes, supervision (layer 3: knows all roles)."""
