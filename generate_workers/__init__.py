"""Generation workers: slots for KV, continuous batching, and delivery of token streams. This package is layer 2: it may
import torch, and imports grpc only in `servicer`."""
