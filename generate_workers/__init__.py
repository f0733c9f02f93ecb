"""A generation group: slots, continuous batching, one writer a stream (layer 2: torch; grpc in servicer alone)."""
