"""Examines this machine: its model folders, calibrations, limits and rates."""
