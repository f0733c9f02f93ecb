"""Run the batch of a generation engine, one step at a time, on the engine's thread."""
