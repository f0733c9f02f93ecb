"""A generation group: slots, continuous batching, one writer per stream (layer 2: torch; grpc only in servicer)."""
