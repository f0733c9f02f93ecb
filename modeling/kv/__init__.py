"""Hold keys and values in memory, and hand out views of them."""
