"""Delivery of streams' events, and streams kept for readers that reconnect."""
