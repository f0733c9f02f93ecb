"""Prefill group: ranks that compute a prompt together as a KV-Runahead chain, and stream the KV to a leased slot."""
