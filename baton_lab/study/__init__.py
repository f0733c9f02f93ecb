"""Comparison of prefill schemes and hardware by calculation, without running them."""
