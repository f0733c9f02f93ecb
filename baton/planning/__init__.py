"""Decisions by calculation: costs, partitions and calibrations. Layer 1: uses only the standard library and numpy,
never torch, grpc or ray."""
