"""Commands that run gateways: processes that serve clients and forward requests to a server elsewhere."""
