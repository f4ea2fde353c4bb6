"""An engine for the commands that run one in-process: the real stream, scripted tokens, steps in the timeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from carousel.config import Settings
from carousel.engine.errors import CarouselError
from carousel.engine.request import FinishReason, GenerationRequest, Output, RequestTimings
from carousel.engine.stream import RequestStream
from carousel.engine.timeline import StepRecord, Timeline


class FakeTokenizer:
    """A token is a word."""

    has_chat_template = True

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


class FakeEngine:
    """Each step gives every running request one token, ``step_s`` seconds after the one before.

    ``short_by`` tokens are missing at the end, ``refuse`` is raised by ``submit``, ``fail`` ends requests as failed.
    """

    model_name = "fake"
    max_model_len = 4096

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer = FakeTokenizer()
        self.timeline = Timeline()
        self.generation_defaults: dict[str, Any] = {"top_p": 0.5, "temperature": 0.25}
        self.step_s = 0.001
        self.short_by = 0
        self.refuse: CarouselError | None = None
        self.fail: str | None = None
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.live = 0
        self.peak = 0
        self.stopped = False

    def submit(self, request: GenerationRequest) -> RequestStream:
        assert not self.stopped
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)
        prompt = request.prompt if isinstance(request.prompt, list) else self.tokenizer.encode(request.prompt)
        stream = RequestStream(request.request_id, len(prompt), 1, lambda: self.cancelled.append(request.request_id))
        task = asyncio.get_running_loop().create_task(self._turn(request, len(prompt), stream))
        stream.task = task  # keeps it alive
        return stream

    async def generate(self, request: GenerationRequest) -> list[Output]:
        async with self.submit(request) as stream:
            return [output async for output in stream]

    async def _turn(self, request: GenerationRequest, prompt_tokens: int, stream: RequestStream) -> None:
        self.live += 1
        self.peak = max(self.peak, self.live)
        count = (request.sampling.max_tokens or 5) - self.short_by
        for place in range(count):
            await asyncio.sleep(self.step_s)
            self._record_step(prompt_tokens if place == 0 else 0)
            output = Output(request.request_id, text=f"w{place} ", token_ids=[place], prompt_tokens=prompt_tokens)
            if self.fail is not None:
                output.finish_reason, output.error = FinishReason.ERROR, self.fail
            elif place == count - 1:
                output.finish_reason = FinishReason.LENGTH
                output.timings = RequestTimings(queue_s=0.25)
            stream.deliver(output)
            if output.finish_reason is not None:
                break
        self.live -= 1

    def _record_step(self, prefill: int) -> None:
        step = StepRecord(0, time.monotonic(), self.step_s, 0, 0, 0, self.live, prefill, 1, 0, 1, 0, self.live, 0)
        self.timeline.record_step(step, [self.step_s])

    def stop(self) -> None:
        self.stopped = True


class Factory:
    """What the commands call to get engines. ``prepare`` is run on each; all are kept, and so are their settings."""

    def __init__(self, prepare: Callable[[FakeEngine], None] = lambda engine: None) -> None:
        self.prepare = prepare
        self.loads = 0
        self.engines: list[FakeEngine] = []

    def __call__(self, settings: Settings) -> Callable[[Settings], Any]:
        self.loads += 1
        return self.start

    def start(self, settings: Settings) -> FakeEngine:
        assert all(engine.stopped for engine in self.engines), "two engines at once"
        engine = FakeEngine(settings)
        self.prepare(engine)
        self.engines.append(engine)
        return engine
