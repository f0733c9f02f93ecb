"""Parses a model's output token by token into reasoning, text and tool calls."""
