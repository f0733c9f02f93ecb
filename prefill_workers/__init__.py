"""A prefill group: KV-Runahead chains of ranks that compute prompts and stream their KV to a leased slot."""
