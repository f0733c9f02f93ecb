"""Policies that attend only to selected keys: InfiniGen."""
