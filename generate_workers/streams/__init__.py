"""Deliver the events of streams, and keep streams for readers that come back."""
