"""Generation group: slots for KV, continuous batching, and delivery of streams (layer 2: torch; grpc only in
servicer)."""
