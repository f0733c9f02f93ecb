"""The web console: pages that show a running cluster, and a playground that shows where each token comes from."""
