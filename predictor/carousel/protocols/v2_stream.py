"""The Open Inference Protocol's ``infer`` as a stream: deltas as tensors of the same shapes as the whole answer's.

Every response has one row per prompt. A row's ``text_output`` pieces join to its text; ``finish_reason`` is empty until
the response that ends the row; the counts are the latest known; ``logprobs`` holds the records of the new tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

from carousel.engine.errors import GenerationFailed
from carousel.engine.request import Output
from carousel.protocols import common
from carousel.protocols.jsonio import dumps
from carousel.protocols.v2 import V2Call, V2Tensor


async def gather(streams: Sequence[AsyncIterator[Output]]) -> AsyncGenerator[dict[int, Output], None]:
    """What has come since the last time, by row: never empty, a row's deltas merged into one.

    A slow reader makes no stream wait, and what waits for it is bounded by the answer itself. An exception of any
    stream ends the whole. Leaving early stops the reading tasks; closing the streams stays with who made them.
    """
    if len(streams) == 1:
        async for output in streams[0]:
            yield {0: output}
        return
    waiting: dict[int, Output] = {}
    arrived = asyncio.Event()

    async def pump(row: int, stream: AsyncIterator[Output]) -> None:
        try:
            async for output in stream:
                if row in waiting:
                    waiting[row].merge(output)
                else:
                    waiting[row] = output
                arrived.set()
        finally:
            arrived.set()

    tasks = [asyncio.create_task(pump(row, stream)) for row, stream in enumerate(streams)]
    try:
        while waiting or not all(task.done() for task in tasks):
            await arrived.wait()
            arrived.clear()
            for task in tasks:
                if task.done():
                    task.result()
            if waiting:
                taken, waiting = waiting, {}
                yield taken
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Deltas:
    """Renders the deltas of one call."""

    def __init__(self, call: V2Call) -> None:
        self._call = call
        rows = len(call.requests)
        self._counts = {name: [0] * rows for name in ("prompt_tokens", "completion_tokens", "cached_tokens")}
        self._unfinished = rows

    @property
    def finished(self) -> bool:
        """Whether every row has ended."""
        return self._unfinished == 0

    def render(self, deltas: Mapping[int, Output]) -> list[V2Tensor]:
        """The tensors of one response, in the order that the client asked for; empty if there is nothing to say yet.

        Raises:
            GenerationFailed: the engine failed on any row.
        """
        call, rows = self._call, len(self._call.requests)
        texts, reasons, logprobs = [""] * rows, [""] * rows, ["[]"] * rows
        anything = False
        for row, output in deltas.items():
            self._counts["prompt_tokens"][row] = output.prompt_tokens
            self._counts["completion_tokens"][row] = output.completion_tokens
            self._counts["cached_tokens"][row] = output.cached_tokens
            texts[row] = output.text
            if output.finish_reason is not None:
                reasons[row] = common.final_reason(output).value
                self._unfinished -= 1
            if output.logprobs:
                top = call.requests[row].sampling.logprobs or 0
                logprobs[row] = dumps(common.logprob_records(call.context.tokenizer, output.logprobs, top))
            anything = anything or bool(output.text or output.logprobs) or output.finish_reason is not None
        if not anything:
            return []
        strings = {"text_output": texts, "finish_reason": reasons, "logprobs": logprobs}
        return [
            V2Tensor(name, "BYTES", [rows], strings[name])
            if name in strings
            else V2Tensor(name, "INT32", [rows], list(self._counts[name]))
            for name in call.outputs
        ]

    def check_end(self) -> None:
        """Raises ``GenerationFailed`` when the streams have ended and a row has not."""
        if not self.finished:
            raise GenerationFailed("the answer ended before its end")
