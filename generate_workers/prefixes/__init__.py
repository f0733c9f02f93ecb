"""Connects slots with the node's store of cached KV blocks."""
