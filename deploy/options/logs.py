"""Sets up the logs of a process, which are written to standard error as lines of text or as JSON objects.

A JSON object has the keys `time` (UTC, ISO 8601), `level`, `logger`, `pid` and `message`. It also has `request_id` if
the line is about a request, and `exc_info` if an exception is logged. Logs never contain prompts or outputs.
"""

import logging
from typing import Any

from baton.process.request_log import SERVED_REQUEST
from baton.settings.place import LogFormat

_TEXT = "%(asctime)s %(process)d %(name)s %(levelname)s %(message)s"


def set_up_logs(level: int, form: LogFormat = "text") -> None:
    """Write this process's log lines of at least `level` to standard error, in the format `form`. Does nothing if logs
    are already set up."""
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
