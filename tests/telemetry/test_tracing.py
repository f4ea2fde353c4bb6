"""W3C trace context, by the rules of its specification."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carousel.telemetry.tracing import accept

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]")


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (f"00-{TRACE}-{SPAN}-01", "01"),
        (f"00-{TRACE}-{SPAN}-00", "00"),
        (f" 00-{TRACE}-{SPAN}-ff ", "01"),  # only the flag that is defined goes on
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-adds", "01"),
    ],
)
def test_a_valid_parent_gets_a_child_of_ours(header, flags):
    trace = accept(header)
    assert (trace.trace_id, trace.parent_id, trace.flags) == (TRACE, SPAN, flags)
    assert trace.span_id != SPAN
    assert VALID.fullmatch(trace.traceparent)
    assert trace.traceparent == f"00-{TRACE}-{trace.span_id}-{flags}"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-zz",
        f"00-{TRACE}-{SPAN}-01\n-x",
    ],
)
def test_what_is_no_parent_is_ignored(header):
    assert accept(header) is None


@given(st.text(max_size=80))
def test_anything_is_taken_or_ignored(header):
    trace = accept(header)
    assert trace is None or VALID.fullmatch(trace.traceparent)
