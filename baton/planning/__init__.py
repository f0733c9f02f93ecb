"""Planning by calculation: cost models, partitions of prompts, and calibrations.

The package uses only the standard library and numpy, never torch, grpc or ray. It is in layer 1 of the project's import
layers.
"""
