"""Compares schemes and hardware by calculation, without running them."""
