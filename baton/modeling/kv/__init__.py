"""Memory for keys and values, and views of it."""
