"""Planning by calculation: cost models, profiles of devices, and partitions of prompts.

The package uses only the standard library, numpy and pydantic, never torch, grpc or ray. It is in layer 1 of the
project's import layers.
"""
