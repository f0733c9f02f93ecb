"""OpenAI-compatible HTTP in front of a Baton server, which it calls over gRPC like any client."""
