"""Stubs generated from proto/baton/v1 by `make proto`; checked in, never edited."""
