"""Runs the supervisor, the orchestrator and the workers as Ray actors."""
