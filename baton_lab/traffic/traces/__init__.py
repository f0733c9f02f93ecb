"""Traces of requests: generation, file formats, and transformations."""
