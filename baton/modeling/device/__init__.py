"""Devices on which attention and linear layers run: their memory, and the link between device memory and host
memory."""
