"""Implements the commands that serve and operate a cluster."""
