"""Orchestrator, between clients and workers: accepts requests, queues and places them, and runs each of them to its
end."""
