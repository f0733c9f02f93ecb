"""Other ways to prefill one prompt on several ranks, built from the same code: what the chain is compared with."""
