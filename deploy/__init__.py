"""Brings Baton up: command line, configuration, processes and supervision (layer 3: the only code that knows all
roles)."""
