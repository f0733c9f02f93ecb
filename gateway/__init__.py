"""OpenAI-compatible HTTP gateway of a Baton server. The gateway calls the server over gRPC, like any other client."""
