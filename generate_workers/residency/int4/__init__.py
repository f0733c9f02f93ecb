"""Keep KV in 4 bits per channel."""
