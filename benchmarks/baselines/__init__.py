"""Other ways to prefill one prompt on several ranks, of the same code: what the chain is compared with."""
