"""Answers clients and operators over gRPC."""
