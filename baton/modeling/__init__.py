"""Our decoder for Llama, OPT and Falcon models, its KV memory and sampling (layer 1: torch; never grpc or ray)."""
