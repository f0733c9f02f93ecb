"""Sets up the process that it runs in: cores, garbage collection, memory."""
