"""Client side of calls: builds a request's message, reads the stream of tokens, and resumes the stream after the
connection to the server was lost."""
