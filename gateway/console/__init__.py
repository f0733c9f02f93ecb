"""The web console: pages that show a running cluster, and a playground that shows how each output token was made."""
