"""Utilities for all Baton processes: CPU cores, garbage collection, free memory, crash notes, and background tasks that
run forever."""
