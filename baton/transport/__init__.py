"""Transfers calls and KV between Baton's processes over gRPC, as bytes and memoryviews, never as tensors."""
