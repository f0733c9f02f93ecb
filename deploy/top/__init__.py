"""`baton top`: shows a running cluster in a terminal, refreshed continuously."""
