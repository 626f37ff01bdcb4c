"""Logs: one line per record on stderr, `time level logger text key=value ...`. IO.

Fields go in `extra`: `log.info("call ended", extra={"call_id": key.call_id})`. Set up once per
process; services of one process share it.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Final, TextIO

_STANDARD: Final = frozenset(
    logging.LogRecord("", 0, "", 0, "", None, None).__dict__.keys()
    | {"message", "asctime", "taskName"}
)
_QUIET: Final = ("httpx", "httpcore", "urllib3", "nats", "uvicorn.access", "asyncio")


class LineFormatter(logging.Formatter):
    """Puts a record, its fields and its traceback on one line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d}Z {record.levelname} {record.name}"
        parts = [head, _one_line(record.getMessage())]
        for name, value in record.__dict__.items():
            if name not in _STANDARD:
                parts.append(f"{name}={_quoted(str(value))}")
        if record.exc_info:
            parts.append(f"error={_quoted(self.formatException(record.exc_info))}")
        return " ".join(parts)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to whatever `sys.stderr` is at the moment of the record."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def set_up(level: str) -> None:
    """Log at `level` and above to stderr; a second call only changes the level."""
    root = logging.getLogger()
    if not any(isinstance(handler, _StderrHandler) for handler in root.handlers):
        handler = _StderrHandler()
        handler.setFormatter(LineFormatter())
        root.addHandler(handler)
    root.setLevel(level.upper())
    for name in _QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)
    # The exporter's own retries would fill the log; telemetry says once a minute that it fails.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def _quoted(value: str) -> str:
    value = _one_line(value)
    if value and " " not in value and '"' not in value and "=" not in value:
        return value
    return '"' + value.replace('"', '\\"') + '"'


def _one_line(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
