"""What the line in the log says of a request beyond its status: tokens, timings, why it ended.

The transport opens notes for a call; whoever submits to the engine writes down which requests belong to it; the engine
thread, through the ``Observer`` protocol, adds each one's record when it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from carousel.engine.request import GenerationRequest
from carousel.engine.timeline import RequestRecord, StepRecord
from carousel.telemetry import logs

#: A longer prompt is cut in the log, and the line says how long it was.
MAX_PROMPT_LOGGED = 4096

_open: dict[str, Notes] = {}  # by the engine's request id, while it is live


class Notes:
    """Of one call. Made and read on an event loop; records come from the engine thread."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.prompts: list[str | list[int]] = []
        self._missing: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._all_in = asyncio.Event()

    def expect(self, request: GenerationRequest) -> None:
        """This request is about to be submitted for the call."""
        self._missing.add(request.request_id)
        _open[request.request_id] = self
        if logs.prompts_wanted():
            self.prompts.append(request.prompt)

    def refused(self, request: GenerationRequest) -> None:
        """The engine did not take it: there will be no record."""
        self._missing.discard(request.request_id)
        _open.pop(request.request_id, None)

    def take(self, record: RequestRecord) -> None:
        """The request has ended. On the engine thread."""
        self.records.append(record)
        self._missing.discard(record.request_id)
        if not self._missing and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._all_in.set)

    async def settle(self, seconds: float = 1.0) -> None:
        """Wait for the records of requests that were just cancelled: the engine ends them before its next step."""
        self._loop = asyncio.get_running_loop()
        if self._missing:
            try:
                async with asyncio.timeout(seconds):
                    await self._all_in.wait()
            except TimeoutError:
                pass  # a step that takes this long: the line goes without them

    def close(self) -> None:
        """Nothing more will be read."""
        for request_id in self._missing:
            _open.pop(request_id, None)

    def fields(self) -> dict[str, Any]:
        """For the log: token counts are sums over the call's requests, times (ms) the longest."""
        found: dict[str, Any] = {}
        if self.records:
            records = list(self.records)
            found["finish_reason"] = ",".join(dict.fromkeys(record.finish_reason.value for record in records))
            found["prompt_tokens"] = sum(record.prompt_tokens for record in records)
            found["cached_tokens"] = sum(record.cached_tokens for record in records)
            found["output_tokens"] = sum(record.output_tokens for record in records)
            for name in ("queue", "ttft", "tpot"):
                values = [value for record in records if (value := getattr(record, f"{name}_s")) is not None]
                if values:
                    found[f"{name}_ms"] = round(max(values) * 1000, 1)
            if preemptions := sum(record.num_preemptions for record in records):
                found["preemptions"] = preemptions
            if len(records) > 1:
                found["requests"] = len(records)
        if self.prompts:
            found["prompts"] = [_shown(prompt) for prompt in self.prompts]
        return found

    @property
    def queue_s(self) -> float | None:
        """How long the call waited: the longest of its requests' queue times, once all of them have ended."""
        waits = [record.queue_s for record in self.records if record.queue_s is not None]
        return None if self._missing else max(waits, default=None)

    def server_timing(self) -> str | None:
        """That as a value of the header ``Server-Timing`` (W3C), in milliseconds."""
        return None if self.queue_s is None else f"queue;dur={self.queue_s * 1000:.3f}"

    def summary(self) -> str:
        """The same in a few words, for people; empty for a call that ran nothing."""
        fields = self.fields()
        if "finish_reason" not in fields:
            return ""
        first = f", first after {fields['ttft_ms']:g} ms" if "ttft_ms" in fields else ""
        return f"; {fields['finish_reason']}, {fields['prompt_tokens']} + {fields['output_tokens']} tokens{first}"


def _shown(prompt: str | list[int]) -> str:
    text = prompt if isinstance(prompt, str) else str(prompt)
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= MAX_PROMPT_LOGGED:
        return text
    return f"{text[:MAX_PROMPT_LOGGED]}… ({len(text)} characters)"


#: Those of the present call.
current_notes: ContextVar[Notes | None] = ContextVar("carousel_notes", default=None)


@contextmanager
def open_notes() -> Generator[Notes, None, None]:
    """Notes for the call that this task serves."""
    notes = Notes()
    token = current_notes.set(notes)
    try:
        yield notes
    finally:
        notes.close()
        current_notes.reset(token)


class NoteTaker:
    """The engine's observer that hands records to the notes."""

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        """Nothing: a step belongs to no call."""

    def on_finish(self, request: RequestRecord) -> None:
        notes = _open.pop(request.request_id, None)
        if notes is not None:
            notes.take(request)
