"""`baton bench`: a load generator for Baton over gRPC, and for any server that speaks OpenAI's API."""
