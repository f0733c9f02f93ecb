"""Orchestrator between clients and workers. It accepts requests, queues them, assigns them to workers, and follows each
of them to its end."""
