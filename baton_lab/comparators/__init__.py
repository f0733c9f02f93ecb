"""Residency policies and draft views from the literature, for comparison with Baton's own. A residency policy
determines where KV is stored and which keys are attended to. A draft view determines which keys draft steps attend to.
They implement the same interfaces as Baton's own. A server's configuration cannot select them."""
