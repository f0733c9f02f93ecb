"""Chain of a prefill: how a prompt is divided among ranks, and at which times the ranks finish."""
