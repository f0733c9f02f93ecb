"""The chain of a prefill: how a prompt is divided among ranks, and when each of them is done."""
