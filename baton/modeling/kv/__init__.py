"""Memory for keys and values (KV), and views of this memory."""
