"""Reads command-line options that several commands share, and shows what they show alike."""
