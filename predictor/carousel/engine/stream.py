"""What a client holds of its request: an asynchronous iterator of deltas that can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable
from types import TracebackType
from typing import Self

from carousel.engine.request import FinishReason, Output


async def collect(stream: AsyncIterable[Output]) -> list[Output]:
    """Read a stream to its end: one merged output per choice, by index."""
    merged: dict[int, Output] = {}
    async for delta in stream:
        if delta.index in merged:
            merged[delta.index].merge(delta)
        else:
            merged[delta.index] = delta
    return [merged[index] for index in sorted(merged)]


class RequestStream:
    """The deltas of one request, all its choices interleaved, until each choice has a ``finish_reason``.

    Lives on one event loop. At most one delta per choice waits for the reader: what comes meanwhile is merged into it,
    so a slow reader stalls nobody and its backlog is bounded by the answer itself. Leaving ``async with`` before the
    end cancels the request.
    """

    def __init__(self, request_id: str, prompt_tokens: int, num_choices: int, cancel: Callable[[], object]) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self._cancel = cancel
        self._open = set(range(num_choices))  # choices that the engine has not ended
        self._unfinished = num_choices  # choices whose end the reader has not seen
        self._pending: dict[int, Output] = {}
        self._arrived = asyncio.Event()

    def deliver(self, output: Output) -> None:
        """Take a delta in. Called on the stream's event loop."""
        if output.index not in self._open:
            return  # of an engine that came back after all, when the reader had been told that it would not
        if output.finish_reason is not None:
            self._open.remove(output.index)
        waiting = self._pending.get(output.index)
        if waiting is None:
            self._pending[output.index] = output
        else:
            waiting.merge(output)
        self._arrived.set()

    def abandon(self, error: str) -> None:
        """End what is open: the engine will not. Called on the stream's event loop."""
        for index in sorted(self._open):
            self.deliver(
                Output(
                    self.request_id,
                    index,
                    finish_reason=FinishReason.ERROR,
                    error=error,
                    prompt_tokens=self.prompt_tokens,
                )
            )

    @property
    def finished(self) -> bool:
        """Whether the reader has everything."""
        return self._unfinished == 0

    def cancel(self) -> None:
        """End the request; its last deltas say ``cancelled``. Harmless once it has finished."""
        if not self.finished:
            self._cancel()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> Output:
        if self.finished:
            raise StopAsyncIteration
        while not self._pending:
            self._arrived.clear()
            await self._arrived.wait()
        output = self._pending.pop(next(iter(self._pending)))
        if output.finish_reason is not None:
            self._unfinished -= 1
        return output

    async def aclose(self) -> None:
        """Cancel what is not finished."""
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()
