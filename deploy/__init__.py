"""Starts and supervises Baton clusters: command line, configuration, processes and supervision. This is the top layer
(layer 3), which imports the packages of all roles."""
