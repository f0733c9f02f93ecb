"""Command-line options and terminal output that are shared by several commands."""
