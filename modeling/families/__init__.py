"""The families of models that we run, one module each: what its config says, and which layers its tensors make."""
