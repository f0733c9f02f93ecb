"""Defines what a request is to the orchestrator, from admission to its one terminal event."""
