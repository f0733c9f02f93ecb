"""Devices: where attention and linears run, the memory that they read, and the link to host memory."""
