"""Connect a group's slots with its node's store of cached KV blocks."""
