"""Prefill group: ranks that compute a prompt as a KV-Runahead chain and stream its KV to a leased slot."""
