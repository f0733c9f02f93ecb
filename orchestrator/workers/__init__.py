"""Calls workers over gRPC, and polls their status."""
