"""The families of models that we run, one module each: reads a config, and composes layers from its tensors."""
