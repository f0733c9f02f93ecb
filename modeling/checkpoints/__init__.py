"""Find, convert and load models."""
