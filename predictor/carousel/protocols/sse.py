"""Server-sent events, and several streams of outputs as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import orjson

from carousel.engine.request import Output
from carousel.protocols.jsonio import json_bytes

MEDIA_TYPE = "text/event-stream"
# Proxies must neither store nor collect what has to arrive token by token.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
_QUEUED_PER_STREAM = 2

# JSON leaves these as they are, but clients that split lines as Python's str.splitlines does would cut an event there.
_LINE_BREAKS = {b"\xc2\x85": b"\\u0085", b"\xe2\x80\xa8": b"\\u2028", b"\xe2\x80\xa9": b"\\u2029"}


def event(payload: Any) -> bytes:
    """One event: ``data: {...}`` and an empty line. Made for every token, so by the fastest encoder there is."""
    try:
        raw = orjson.dumps(payload)
    except TypeError:  # what it is too strict for: a lone surrogate, an integer of more than 64 bits
        raw = json_bytes(payload)
    if not raw.isascii():
        for line_break, escape in _LINE_BREAKS.items():
            raw = raw.replace(line_break, escape)
    return b"data: " + raw + b"\n\n"


async def merge(streams: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[tuple[int, Output], None]:
    """All outputs of ``streams`` as they come, each with the index of its stream.

    What is buffered is bounded; a slow reader makes the streams themselves wait. An exception of any stream ends the
    whole. Leaving early stops the reading tasks; closing the streams stays with who made them.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield 0, output
        return
    queue: asyncio.Queue[tuple[int, Output | Exception | None]] = asyncio.Queue(_QUEUED_PER_STREAM * len(streams))

    async def pump(index: int, stream: AsyncIterator[Output]) -> None:
        try:
            async for output in stream:
                await queue.put((index, output))
        except Exception as error:
            await queue.put((index, error))
        else:
            await queue.put((index, None))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    live = len(tasks)
    try:
        while live:
            index, item = await queue.get()
            if item is None:
                live -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
