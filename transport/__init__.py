"""gRPC between Baton's processes: channels, statuses, and KV on its way; bytes and memoryviews, never tensors."""
