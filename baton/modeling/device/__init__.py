"""Devices: where attention and linear layers run, the device's memory, and the link between it and host memory."""
