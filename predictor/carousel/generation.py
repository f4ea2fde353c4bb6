"""From a parsed call to its outputs: submit all its requests or none, and cancel them when the caller leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any, Protocol

from carousel.engine.errors import InvalidRequest
from carousel.engine.request import FinishReason, GenerationRequest, Output
from carousel.engine.stream import collect
from carousel.lifecycle import EngineLike, StreamLike
from carousel.protocols.errors import RequestTimedOut
from carousel.telemetry.notes import current_notes
from carousel.telemetry.tracing import current_call
from carousel.tenancy.quota import Ticket, current_caller

LONGEST_TURN_S = 0.02
"""Seconds of submitting after which the event loop may serve others: a call can have thousands of choices."""

LONG_TEXT = 4096
"""Characters from which a prompt is tokenised on a thread: below, the hand-over costs more than the work."""

#: When the transport itself gives the present call up, on the clock of ``time.monotonic``; None: never.
call_deadline: ContextVar[float | None] = ContextVar("carousel_call_deadline", default=None)


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
    texts = [request for request in call.requests if isinstance(request.prompt, str)]
    if sum(len(request.prompt) for request in texts) > LONG_TEXT:
        # The engine would tokenise them on the event loop, and other clients' streams would stand still.
        await asyncio.to_thread(_tokenize, engine.tokenizer, texts)
    _hurry(call)
    ticket = _enter(stack, call)
    streams: list[StreamLike] = []
    notes, span = current_notes.get(), current_call.get()
    turn = time.monotonic()
    for index, request in enumerate(call.requests):
        if time.monotonic() - turn > LONGEST_TURN_S:
            await asyncio.sleep(0)
            turn = time.monotonic()
        if notes is not None:
            notes.expect(request)
        if span is not None:
            span.follow(request)
        try:
            stream = engine.submit(request)
        except Exception as error:
            if notes is not None:
                notes.refused(request)
            if span is not None:
                span.refused(request)
            raise call.restate(error, index) from error
        if ticket is not None:
            ticket.prompt(stream.prompt_tokens)
        streams.append(await stack.enter_async_context(stream))
    return streams


def _enter(stack: AsyncExitStack, call: Call) -> Ticket | None:
    """Hold the caller to its quotas until the stack is left."""
    caller = current_caller.get()
    if caller is None:
        return None
    try:
        ticket = caller.governor.enter(caller.tenant, call.requests)
    except InvalidRequest as error:
        raise call.restate(error) from error
    stack.callback(ticket.leave)
    return ticket


def _tokenize(tokenizer: Any, requests: list[GenerationRequest]) -> None:
    for request in requests:
        assert isinstance(request.prompt, str)
        request.prompt = tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens)


def _hurry(call: Call) -> None:
    """No request may outlast the call.

    Raises:
        RequestTimedOut: there is no time left.
    """
    deadline = call_deadline.get()
    if deadline is None:
        return
    if time.monotonic() >= deadline:
        raise RequestTimedOut("the call's deadline passed before the request could be submitted")
    for request in call.requests:
        left = max(deadline - request.arrival, 1e-6)
        request.timeout_s = left if request.timeout_s is None else min(request.timeout_s, left)


async def run_all(engine: EngineLike, call: Call) -> list[list[Output]]:
    """All outputs of all requests of ``call``, which run in the batch side by side.

    Raises:
        RequestTimedOut: the transport's deadline (:data:`call_deadline`) ended a request. A request's own timeout does
            not raise: it is a finish reason.
    """
    async with AsyncExitStack() as stack:
        streams: Sequence[StreamLike] = await submit_all(stack, engine, call)
        results = [await collect(stream) for stream in streams]
    deadline = call_deadline.get()
    if deadline is not None and time.monotonic() >= deadline:
        late = [output for outputs in results for output in outputs if output.finish_reason is FinishReason.TIMEOUT]
        if late:  # nobody would read the partial answer
            tokens = sum(output.completion_tokens for output in late)
            raise RequestTimedOut(f"the call's deadline passed after {tokens} output tokens")
    return results
