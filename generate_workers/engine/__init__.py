"""Generation engine: runs the batch, one step at a time, on the engine's thread."""
