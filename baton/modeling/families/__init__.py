"""Supported model families. Each module reads a model's config, and builds its layers from the tensors of a
checkpoint."""
