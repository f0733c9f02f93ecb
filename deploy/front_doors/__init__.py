"""Commands that run gateways. A gateway is a process that serves clients and forwards their requests to a server that
runs elsewhere."""
