"""Delivers the events of streams, and keeps them for readers that come back."""
