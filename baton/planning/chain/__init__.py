"""Planning of prefill chains: the partition of a prompt among ranks, and the predicted times at which the ranks
finish."""
