"""From a parsed call to its outputs: submit all its requests or none, and cancel them when the caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from carousel.engine.request import GenerationRequest, Output
from carousel.engine.stream import collect
from carousel.lifecycle import EngineLike, StreamLike

LONG_TEXT = 4096
"""Characters from which a prompt is tokenised on a thread: below, the hand-over costs more than the work."""


class Call(Protocol):
    """The part of ``protocols.common.Call`` that is needed here."""

    requests: list[GenerationRequest]

    def restate(self, error: Exception, index: int = 0) -> Exception: ...


async def submit_all(stack: AsyncExitStack, engine: EngineLike, call: Call) -> list[StreamLike]:
    """Submit every request of ``call``; leaving ``stack`` cancels those that still run.

    Raises:
        CarouselError: what the engine refused, in the client's own field names. The caller leaves the stack then, which
            takes back what had been admitted.
    """
    for request in call.requests:
        if isinstance(request.prompt, str) and len(request.prompt) > LONG_TEXT:
            # The engine would tokenise it on the event loop, and other clients' streams would stand still.
            request.prompt = await asyncio.to_thread(
                engine.tokenizer.encode, request.prompt, add_special_tokens=request.add_special_tokens
            )
    streams: list[StreamLike] = []
    for index, request in enumerate(call.requests):
        try:
            stream = engine.submit(request)
        except Exception as error:
            raise call.restate(error, index) from error
        streams.append(await stack.enter_async_context(stream))
    return streams


async def run_all(engine: EngineLike, call: Call) -> list[list[Output]]:
    """All outputs of all requests of ``call``, which run in the batch side by side."""
    async with AsyncExitStack() as stack:
        streams: Sequence[StreamLike] = await submit_all(stack, engine, call)
        return [await collect(stream) for stream in streams]
