"""Commands that serve clients in front of a server that runs elsewhere."""
