"""W3C trace context: taken from a request, put on its answer and on its log lines.

Without ``--traces`` a request without ``traceparent`` starts no trace: it has its request id. With it there are spans,
in ``spans``, which needs OpenTelemetry's packages; here is only what costs nothing without them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from carousel.engine.request import GenerationRequest

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16


@dataclass(frozen=True, slots=True)
class Trace:
    """A place in a trace: hexadecimal ids, as in the header. ``parent_id`` is the caller's span, or empty."""

    trace_id: str
    parent_id: str
    span_id: str
    flags: str

    @property
    def traceparent(self) -> str:
        """The header of an answer, or of a call made on this request's behalf."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"

    @property
    def sampled(self) -> bool:
        return self.flags == "01"

    def with_flag(self, sampled: bool) -> Trace:
        return self if sampled is self.sampled else replace(self, flags="01" if sampled else "00")


class Call(Protocol):
    """The span of a client's call, while it is served. See ``spans.CallSpan``."""

    trace: Trace

    def follow(self, request: GenerationRequest) -> None: ...
    def refused(self, request: GenerationRequest) -> None: ...
    def end(self, attributes: Mapping[str, Any], error: str | None = None) -> None: ...


class Tracer(Protocol):
    """Begins the spans of calls. See ``spans.Spans``."""

    def begin(self, headers: Mapping[str, str], name: str, attributes: dict[str, Any]) -> Call: ...


#: The trace that the present request belongs to.
current_trace: ContextVar[Trace | None] = ContextVar("carousel_trace", default=None)
#: The span of the present call, where there are spans.
current_call: ContextVar[Call | None] = ContextVar("carousel_call", default=None)


def root() -> Trace:
    """The beginning of a trace of our own."""
    return Trace(secrets.token_hex(16), "", secrets.token_hex(8), "01")


def accept(traceparent: str) -> Trace | None:
    """A span of our own under the caller's; None for what is no valid ``traceparent``, as W3C wants it ignored."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    # Version ff is forbidden, version 00 has nothing after the flags; a later version may.
    if version == "ff" or (version == "00" and rest) or trace_id == _NO_TRACE or parent_id == _NO_SPAN:
        return None
    return Trace(trace_id, parent_id, secrets.token_hex(8), f"{int(flags, 16) & 1:02x}")
