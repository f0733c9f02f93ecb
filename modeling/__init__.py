"""Our own decoder for Llama, OPT and Falcon models, its KV memory, attention and sampling (layer 1: torch; never grpc
or ray)."""
