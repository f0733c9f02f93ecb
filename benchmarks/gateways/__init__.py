"""Runs orchestrators and gateways with scripted engines (`benchmarks.gateway`)."""
