"""Calls of a client: the message of a request, and the stream that answers it, resumed when the server goes away."""
