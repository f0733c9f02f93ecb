"""Keeps requests in a bounded, fair queue, or refuses them."""
