"""Id of the request that a task serves. Log lines of the task contain this id."""

from contextvars import ContextVar

SERVED_REQUEST: ContextVar[str] = ContextVar("served_request", default="")
"""Id of the request that the current task serves. Tasks created by this task inherit it. Empty if the task does not
serve a request."""
