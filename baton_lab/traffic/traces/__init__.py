"""Traces of requests: made, read from files, and cut."""
