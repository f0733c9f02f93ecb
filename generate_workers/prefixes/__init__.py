"""Copies between a group's slots and its node's store of cached KV blocks."""
