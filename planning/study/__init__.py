"""Compares schemes and hardware on paper; nothing that serves uses it."""
