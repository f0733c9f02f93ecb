"""Transfer of calls and KV between Baton's processes over gRPC. KV is passed as bytes and memoryviews, never as
tensors."""
