"""Decisions by calculation: costs, partitions, calibrations (layer 1: stdlib and numpy; never torch, grpc, ray)."""
