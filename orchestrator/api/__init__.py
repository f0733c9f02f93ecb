"""gRPC services of the orchestrator, for clients and operators."""
