"""Logging for a terminal and for a pod, with the request id on every line of a request and no prompt unless asked.

Everything that the process logs, uvicorn and kserve included, goes through the root logger's one handler, so that a
pod's log is one JSON object a line and a terminal's is readable.
"""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import os
import sys
import traceback
from typing import Any, TextIO

import orjson

from carousel.telemetry.tracing import current_trace

#: The id of the request that the current task serves, or the empty string.
current_request_id: contextvars.ContextVar[str] = contextvars.ContextVar("carousel_request_id", default="")

LEVELS = ("debug", "info", "warning", "error", "critical")
FORMATS = ("auto", "text", "json")

_COLOURS = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[31;1m",
}
_QUIET = {"asyncio": logging.WARNING, "grpc": logging.WARNING, "httpx": logging.WARNING, "httpcore": logging.WARNING}


_prompts = False


def prompts_wanted() -> bool:
    """Whether the log may hold what clients wrote."""
    return _prompts


class _RequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if not hasattr(record, "request_id"):
            record.request_id = current_request_id.get()
        if not hasattr(record, "trace"):
            record.trace = current_trace.get()
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, then what the line itself carries.

    A record's own fields come from ``extra={"fields": {...}}``.
    """

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := getattr(record, "request_id", ""):
            line["request_id"] = request_id
        if trace := getattr(record, "trace", None):
            line["trace_id"], line["span_id"] = trace.trace_id, trace.span_id
        line.update(getattr(record, "fields", {}))
        if record.exc_info and record.exc_info[0] is not None:
            line["exception"] = "".join(traceback.format_exception(*record.exc_info)).rstrip()
        try:
            return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()
        except TypeError:  # a lone surrogate, in what a client sent or in an exception's text
            return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    """``12:00:00.123 INFO  server: message [request id]``, coloured by level where ``colour`` is set."""

    def __init__(self, colour: bool = False) -> None:
        super().__init__()
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).astimezone().strftime("%H:%M:%S.%f")[:-3]
        name = record.name.removeprefix("carousel.")
        line = f"{time} {record.levelname:<7} {name}: {one_line(record.getMessage())}"
        if request_id := getattr(record, "request_id", ""):
            line += f" [{request_id}]"
        if record.exc_info and record.exc_info[0] is not None:
            line += "\n" + "".join(traceback.format_exception(*record.exc_info)).rstrip()
        if self.colour and (start := _COLOURS.get(record.levelno)):
            line = f"{start}{line}\x1b[0m"
        return line


def one_line(text: str) -> str:
    """``text`` with control characters and lone surrogates escaped: nobody can forge a line, or colour the terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def resolve_format(format: str, stream: TextIO) -> str:
    """``auto`` means ``text`` on a terminal and ``json`` elsewhere.

    Raises:
        ValueError: for a format that is not one of ``FORMATS``.
    """
    if format not in FORMATS:
        raise ValueError(f"log format {format!r}: allowed are {', '.join(FORMATS)}")
    if format != "auto":
        return format
    return "text" if stream.isatty() else "json"


def configure_logging(
    level: str = "info", format: str = "auto", stream: TextIO | None = None, *, prompts: bool = False
) -> None:
    """Route the whole process's logging to ``stream`` (default: standard error). May be called again.

    Args:
        level: one of ``LEVELS``.
        format: one of ``FORMATS``.
        stream: where lines go.
        prompts: whether the line of a request holds its prompts.

    Raises:
        ValueError: for an unknown level or format.
    """
    if level.lower() not in LEVELS:
        raise ValueError(f"log level {level!r}: allowed are {', '.join(LEVELS)}")
    global _prompts
    _prompts = prompts
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    if resolve_format(format, stream) == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(TextFormatter(colour=stream.isatty() and "NO_COLOR" not in os.environ))
    handler.addFilter(_RequestId())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
    for name, quiet in _QUIET.items():
        logging.getLogger(name).setLevel(max(quiet, root.level))
    adopt("kserve", "kserve.trace", "uvicorn", "uvicorn.error", "uvicorn.access")


def adopt(*names: str) -> None:
    """Strip the handlers that libraries gave their own loggers, so that their lines reach the root's one handler."""
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers = []
        logger.propagate = True
        logger.setLevel(logging.NOTSET)
