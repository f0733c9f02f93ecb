"""What a client sends for a request, and the stream that answers it, resumed when the server goes away."""
