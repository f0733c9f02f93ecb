"""Reads what a model writes: its reasoning, its text, and its calls of tools, token by token."""
