"""Decoder for the supported model families, with KV memory and sampling. This layer imports torch, but never grpc or
ray."""
