"""Stands between clients and workers: takes requests, queues and places them, and sees each through to its one end."""
