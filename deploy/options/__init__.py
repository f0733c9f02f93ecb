"""Reads command-line options that several commands share."""
