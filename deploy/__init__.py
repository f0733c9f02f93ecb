"""Brings Baton up: command line, configuration, processes and supervision (layer 3: knows all roles)."""
