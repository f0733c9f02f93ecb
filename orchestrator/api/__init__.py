"""Serves clients and operators over gRPC."""
