"""Serves one attempt at a request, and reads its stream."""
