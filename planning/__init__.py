"""Decisions by calculation: costs, partitions and calibrations (layer 1: stdlib and numpy; never torch, grpc or
ray)."""
