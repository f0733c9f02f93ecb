"""The request that a task serves, so that every line that it logs can name it."""

from contextvars import ContextVar

SERVED_REQUEST: ContextVar[str] = ContextVar("served_request", default="")
"""Id of the request that the present task serves; tasks that it makes have it, too. Empty outside of requests."""
