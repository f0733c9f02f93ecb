"""Sets up what a process logs to standard error: lines for people, or JSON objects for machines.

An object has `time` (UTC, ISO 8601), `level`, `logger`, `pid`, `message`, `request_id` where the line is about a
request, and `exc_info` where an exception is logged. Neither form has prompts or answers.
"""

import logging
from typing import Any

from baton.process.request_log import SERVED_REQUEST
from baton.settings.place import LogFormat

_TEXT = "%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"


def set_up_logs(level: int, form: LogFormat = "text") -> None:
    """Log this process's lines of at least this level to standard error. Does nothing where logs are set up already."""
    handler = logging.StreamHandler()
    handler.setFormatter(_json_lines() if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(level=level, handlers=[handler])


def _json_lines() -> logging.Formatter:
    from pythonjsonlogger.json import JsonFormatter  # imported here, because text needs none

    class _Lines(JsonFormatter):
        def add_fields(self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]) -> None:
            super().add_fields(log_data, record, message_dict)
            if request_id := SERVED_REQUEST.get():
                log_data["request_id"] = request_id

    names = {"levelname": "level", "name": "logger", "process": "pid"}
    return _Lines("%(levelname)s %(name)s %(process)d %(message)s", rename_fields=names, timestamp="time")
