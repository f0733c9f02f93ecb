"""Generation workers: slots for KV, continuous batching, and delivery of token streams. In the import order of
packages, in which layer 0 is the lowest, this package is in layer 2. It may import torch, and imports grpc only in
`servicer`."""
