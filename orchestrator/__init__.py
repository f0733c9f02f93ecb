"""Serves between clients and workers: accepts requests, queues and places them, and runs each to its one end."""
