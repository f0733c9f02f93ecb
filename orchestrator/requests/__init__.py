"""Defines a request as the orchestrator sees it, from admission to its one terminal event."""
