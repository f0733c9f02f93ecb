"""Supported families of models. Each module reads a config, and composes layers from a checkpoint's tensors."""
