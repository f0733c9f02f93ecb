"""Residency policies and draft views to compare Baton's own with, behind the same ports. A server's configuration
cannot select them."""
