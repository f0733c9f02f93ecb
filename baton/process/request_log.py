"""Id of the request that a task serves, so that every log line of the task can name it."""

from contextvars import ContextVar

SERVED_REQUEST: ContextVar[str] = ContextVar("served_request", default="")
"""Id of the request that the current task serves. Tasks created by this task inherit it. Empty if the task does not
serve a request."""
