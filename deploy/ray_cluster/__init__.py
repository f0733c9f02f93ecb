"""Runs supervisor, orchestrator and workers as Ray actors."""
