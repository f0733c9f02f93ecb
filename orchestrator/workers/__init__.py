"""Calls workers over gRPC, and polls what they hold."""
