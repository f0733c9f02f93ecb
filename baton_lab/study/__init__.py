"""Compares schemes and hardware by calculation alone."""
