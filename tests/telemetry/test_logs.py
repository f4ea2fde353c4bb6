"""Log lines for people and for machines."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from carousel.telemetry import logs, tracing


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_json_lines_carry_the_request_id_and_their_fields():
    stream = io.StringIO()
    logs.configure_logging("info", "json", stream)
    token = logs.current_request_id.set("id-1")
    logging.getLogger("carousel.x").info("took %d", 3, extra={"fields": {"status": 200}})
    logs.current_request_id.reset(token)
    logging.getLogger("carousel.x").warning("nobody's\nline")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert first == {
        "time": first["time"], "level": "info", "logger": "carousel.x", "message": "took 3", "request_id": "id-1",
        "status": 200,
    }  # fmt: skip
    assert first["time"].endswith("Z")
    assert second["message"] == "nobody's\nline"
    assert "request_id" not in second


def test_exceptions_stay_on_their_line_in_json():
    stream = io.StringIO()
    logs.configure_logging("info", "json", stream)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("carousel.x").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: bad" in json.loads(line)["exception"]


def test_text_lines():
    stream = io.StringIO()
    logs.configure_logging("info", "text", stream)
    token = logs.current_request_id.set("id-2")
    logging.getLogger("carousel.server").info("hello")
    logs.current_request_id.reset(token)
    assert stream.getvalue().endswith("INFO    server: hello [id-2]\n")
    assert "\x1b" not in stream.getvalue()


def test_colour_only_on_a_terminal_that_wants_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    logs.configure_logging("info", "auto", stream)
    logging.getLogger("carousel.x").error("red")
    assert "\x1b[31m" in stream.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    logs.configure_logging("info", "auto", plain)
    logging.getLogger("carousel.x").error("plain")
    assert "\x1b" not in plain.getvalue()


def test_auto_is_text_on_a_terminal_and_json_elsewhere():
    assert logs.resolve_format("auto", Terminal()) == "text"
    assert logs.resolve_format("auto", io.StringIO()) == "json"
    assert logs.resolve_format("text", io.StringIO()) == "text"


def test_level():
    stream = io.StringIO()
    logs.configure_logging("warning", "text", stream)
    logging.getLogger("carousel.x").info("quiet")
    logging.getLogger("carousel.x").warning("loud")
    assert "quiet" not in stream.getvalue()
    assert "loud" in stream.getvalue()


@pytest.mark.parametrize("name", ["kserve", "kserve.trace", "uvicorn", "uvicorn.error", "uvicorn.access"])
def test_libraries_log_through_the_one_handler(name):
    library = logging.getLogger(name)
    own = io.StringIO()
    library.addHandler(logging.StreamHandler(own))
    library.propagate = False
    stream = io.StringIO()
    logs.configure_logging("info", "json", stream)
    library.info("from a library")
    assert json.loads(stream.getvalue())["logger"] == name
    assert own.getvalue() == ""


def test_wrong_names_are_refused():
    with pytest.raises(ValueError, match="log level 'loud'"):
        logs.configure_logging("loud", "text")
    with pytest.raises(ValueError, match="log format 'xml'"):
        logs.configure_logging("info", "xml")


def test_lines_of_a_traced_request_carry_the_trace():
    stream = io.StringIO()
    logs.configure_logging("info", "json", stream)
    trace = tracing.accept("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")
    token = tracing.current_trace.set(trace)
    logging.getLogger("carousel.x").info("within")
    tracing.current_trace.reset(token)
    logging.getLogger("carousel.x").info("without")
    within, without = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (within["trace_id"], within["span_id"]) == (trace.trace_id, trace.span_id)
    assert "trace_id" not in without


@pytest.mark.parametrize("format", ["text", "json"])
def test_what_a_client_wrote_forges_no_line_and_loses_none(format):
    stream = io.StringIO()
    logs.configure_logging("info", format, stream)
    path = "/a\n12:00:00.000 CRITICAL server: all is lost\x1b[31m\ud800é"
    logging.getLogger("carousel.x").info("GET %s", path, extra={"fields": {"path": path}})
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line
    if format == "json":
        assert json.loads(line)["path"] == path
    else:
        assert line.endswith("\\x1b[31m\\ud800é")
