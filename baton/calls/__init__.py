"""Client side of calls: builds a request's message, reads the stream of its tokens, and resumes the stream after the
server was lost."""
