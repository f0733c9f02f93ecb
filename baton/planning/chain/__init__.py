"""The chain of a prefill: the division of a prompt among ranks, and the times at which they finish."""
