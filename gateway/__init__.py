"""OpenAI-compatible HTTP in front of a Baton server, which it asks over gRPC as any client does."""
