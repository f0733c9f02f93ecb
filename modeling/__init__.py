"""Our own decoder for the Llama family, its KV memory, attention and sampling (layer 1: torch; never grpc or ray)."""
