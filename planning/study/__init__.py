"""Compares schemes and hardware by calculation alone; no service code uses it."""
