"""Defines requests in the orchestrator: parameters, tenant, state and record."""
