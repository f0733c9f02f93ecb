"""Tells operators how the cluster stands: state, health and metrics."""
