"""Copies cached KV blocks between the slots of a group and the prefix cache of its node."""
