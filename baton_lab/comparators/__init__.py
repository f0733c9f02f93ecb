"""Policies and draft views that Baton's own are compared with, behind the same ports. No configuration of a server
takes them."""
