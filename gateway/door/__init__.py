"""Admission of HTTP requests: bounds on connections, headers and bodies, and checks of the caller."""
