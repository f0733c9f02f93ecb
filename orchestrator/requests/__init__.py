"""Defines a request in the orchestrator: its parameters, its tenant, its state and its record."""
