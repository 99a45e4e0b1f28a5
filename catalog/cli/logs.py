"""Log messages of the libraries, on standard error: a line of text for people, a JSON object per line for programs."""

from __future__ import annotations

import json
import logging
import sys

from catalog.cli.text import printable

LOGGERS = ("ckptlib", "catalog", "flows")
"""Ours. Those of other libraries keep quiet."""


class TextFormatter(logging.Formatter):
    """``warning: ckptlib: what happened``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, and the traceback if there is one."""
        line = f"{record.levelname.lower()}: {record.name}: {printable(record.getMessage())}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """``{"message_type": "log", "level": "warning", "logger": "ckptlib", "message": "what happened"}``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        value = {
            "message_type": "log",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            value["traceback"] = self.formatException(record.exc_info)
        return json.dumps(value, ensure_ascii=False)


def log_to_stderr(level: str, *, as_json: bool) -> None:
    """Sends the log messages of `LOGGERS` to standard error from now on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers = [other for other in logger.handlers if not isinstance(other.formatter, _OURS)] + [handler]
        logger.setLevel(level)


_OURS = (TextFormatter, JsonFormatter)
