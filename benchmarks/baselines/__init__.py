"""Alternative schemes that prefill one prompt on several ranks, for comparison with the chain. They are built from the
same code as the chain."""
