"""Residency policies and draft views from the literature, for comparison with Baton's own. They implement the same
interfaces. A server's configuration cannot select them."""
