"""Alternative schemes to prefill one prompt on several ranks, built from the same code, for comparison with the
chain."""
