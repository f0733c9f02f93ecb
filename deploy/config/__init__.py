"""Defines the configuration of a cluster and of one worker, and reads it from files and options."""
