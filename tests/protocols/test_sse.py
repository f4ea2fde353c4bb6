"""Events on the wire, and several streams read as one."""

from __future__ import annotations

import asyncio
import json

import pytest
from protocol_fakes import output, script

from carousel.protocols import sse


def test_an_event_is_one_line_for_every_line_splitter():
    text = "a\nb\r\nc\u2028d\u2029e\x85f\x0bg\x1eh😀"
    raw = sse.event({"t": text})
    assert raw.startswith(b"data: ")
    assert raw.endswith(b"\n\n")
    line = raw.decode().removesuffix("\n\n")
    assert len(line.splitlines()) == 1
    assert "😀" in line


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        ("\ud800", b'"\\ud800"'),  # no encoder takes a lone surrogate
        (2**70, str(2**70).encode()),
        ('\x00\x7f"\\/', b'"\\u0000\x7f\\"\\\\/"'),
        (-9999.0, b"-9999.0"),
        ("é\u2027\u202a\x84\x86", '"é\u2027\u202a\x84\x86"'.encode()),  # neighbours of what is escaped
    ],
)
def test_an_event_takes_whatever_an_answer_can_hold(value, raw):
    assert sse.event({"t": value}) == b'data: {"t":' + raw + b"}\n\n"
    assert json.loads(sse.event({"t": value})[6:]) == {"t": value}


async def test_one_stream_passes_straight_through():
    assert [(w, o.text) async for w, o in sse.merge([script(output("a"), output("b"))])] == [(0, "a"), (0, "b")]


async def test_streams_interleave_and_each_keeps_its_order():
    streams = [script(*(output(f"{which}{step}") for step in range(20))) for which in range(5)]
    seen = [(which, item.text) async for which, item in sse.merge(streams)]
    assert len(seen) == 100
    for which in range(5):
        assert [text for index, text in seen if index == which] == [f"{which}{step}" for step in range(20)]
    assert [index for index, _ in seen] != sorted(index for index, _ in seen)


async def test_no_streams_are_an_empty_stream():
    assert [item async for item in sse.merge([])] == []


async def test_an_exception_of_one_stream_ends_the_whole():
    async def forever():
        while True:
            yield output("x")
            await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="broken"):
        async for _ in sse.merge([forever(), script(output("a"), RuntimeError("broken"))]):
            pass


async def test_leaving_early_stops_the_readers():
    before = asyncio.all_tasks()
    produced = 0

    async def endless():
        nonlocal produced
        while True:
            produced += 1
            yield output("x")

    merged = sse.merge([endless(), endless()])
    async for _ in merged:
        break
    assert asyncio.all_tasks() != before
    await merged.aclose()
    assert asyncio.all_tasks() == before
    assert produced < 20, "what is buffered for a slow reader must be bounded"
