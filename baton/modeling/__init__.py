"""Decoder for the supported families of models, with its KV memory and sampling. Layer 1: uses torch, never grpc or
ray."""
