"""Admission of HTTP requests: limits on connections, headers and bodies, and checks of the caller."""
