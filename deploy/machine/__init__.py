"""Examines this machine: its model folders, limits and rates."""
