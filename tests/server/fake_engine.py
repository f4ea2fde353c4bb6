"""An engine without a model: scripted tokens at a chosen pace, with the real engine's API and accounts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from carousel.config import Settings
from carousel.engine.errors import EngineUnavailable, RequestTooLong
from carousel.engine.events import Glance, PoolView
from carousel.engine.request import FinishReason, GenerationRequest, Output, TokenLogprob
from carousel.engine.timeline import EngineStats, RequestRecord, StepRecord, Timeline

VOCABULARY = 512


class FakeTokenizer:
    """A token is a character; the chat template writes ``role: content`` lines."""

    has_chat_template = True
    vocab_size = VOCABULARY
    eos_ids = frozenset({0})
    bos_id = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(character) % VOCABULARY for character in text]

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return chr(token_id).encode()

    def token_text(self, token_id: int) -> str:
        return chr(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id == 0

    def apply_chat_template(
        self, messages: list[dict[str, Any]], add_generation_prompt: bool = True, **extra: Any
    ) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


class FakeStream:
    """Yields ``w0 w1 w2 ...``, a token per delta, for every choice in turn."""

    def __init__(self, engine: FakeEngine, request: GenerationRequest, prompt_tokens: int) -> None:
        self.engine, self.request = engine, request
        self.request_id = request.request_id
        self.prompt_tokens = prompt_tokens
        self.produced = 0
        self.ended: FinishReason | None = None
        self.started = time.monotonic()
        self._position = 0
        limit = min(request.sampling.max_tokens or 16, max(1, engine.max_model_len - prompt_tokens))
        self._script = [(index, i) for i in range(limit) for index in range(request.sampling.n)]
        self._limit = limit

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        self._end(FinishReason.CANCELLED)

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Output:
        if self._position >= len(self._script):
            raise StopAsyncIteration
        index, i = self._script[self._position]
        self._position += 1
        if self.engine.delay_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.engine.stopped.wait(), self.engine.delay_s)
        token = 97 + i % 26
        output = Output(
            self.request_id,
            index,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=i,
            text="",
        )
        if self.engine.stopped.is_set() or self.engine.failure:
            self._end(FinishReason.ERROR)
            self._position = len(self._script)
            output.finish_reason, output.error = FinishReason.ERROR, self.engine.failure or "the server shut down"
            return output
        output.text, output.token_ids, output.completion_tokens = f"w{i} ", [token], i + 1
        if self.request.sampling.logprobs is not None:
            top = [(token, -0.5), (token + 1, -1.5)][: self.request.sampling.logprobs]
            output.logprobs = [TokenLogprob(token, -0.5, 1, top)]
        if i + 1 == self._limit:
            output.finish_reason = FinishReason.LENGTH
        self.produced += 1
        self.engine.note_token()
        if self._position == len(self._script):
            self._end(FinishReason.LENGTH)
        return output

    def _end(self, reason: FinishReason) -> None:
        if self.ended is None:
            self.ended = reason
            self.engine.note_end(self)


class FakeEngine:
    """``delay_s`` seconds per delta. Set ``refuse`` to have every submission raise it."""

    model_name = "fake"
    vocab_size = VOCABULARY
    max_model_len = 4096

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.tokenizer = FakeTokenizer()
        self.generation_defaults: dict[str, Any] = {}
        self.timeline = Timeline()
        self.delay_s = 0.0
        self.refuse: Exception | None = None
        self.failure: str | None = None
        self.alive = True
        self.draining = False
        self.stopped = asyncio.Event()
        self.live: set[FakeStream] = set()
        self.ended: list[FakeStream] = []
        self.admitted = self.rejected = self.generated = self.prompted = 0
        self.loop: asyncio.AbstractEventLoop | None = None

    @property
    def ready(self) -> bool:
        return self.alive and not self.draining and self.failure is None

    def submit(self, request: GenerationRequest) -> FakeStream:
        self.loop = asyncio.get_running_loop()
        request.sampling.validate(VOCABULARY)
        ids = self.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
        try:
            if self.refuse is not None:
                raise self.refuse
            if self.draining:
                raise EngineUnavailable("the engine is draining")
            if len(ids) > self.max_model_len:
                raise RequestTooLong("prompt", f"{len(ids)} tokens", f"at most {self.max_model_len}")
        except Exception:
            self.rejected += 1
            raise
        self.admitted += 1
        self.prompted += len(ids)
        stream = FakeStream(self, request, len(ids))
        self.live.add(stream)
        return stream

    def note_token(self) -> None:
        self.generated += 1
        step = StepRecord(self.generated, 0.0, 0.001, 0, 0, 0, 1, 0, 1, 0, 1, 0, len(self.live), 0)
        self.timeline.record_step(step, [0.001])

    def note_end(self, stream: FakeStream) -> None:
        self.live.discard(stream)
        self.ended.append(stream)
        assert stream.ended is not None
        took = time.monotonic() - stream.started
        self.timeline.record_request(
            RequestRecord(
                stream.request_id,
                stream.request.tenant,
                stream.ended,
                stream.request.sampling.n,
                stream.prompt_tokens,
                0,
                stream.produced,
                0,
                took,
                0.0,
                took,
                0.0,
                took,
                0.001,
            )
        )

    def stats(self) -> EngineStats:
        finished = {reason: sum(s.ended is reason for s in self.ended) for reason in FinishReason}
        return EngineStats(
            num_requests_running=len(self.live),
            num_sequences_running=len(self.live),
            admitted=self.admitted,
            rejected=self.rejected,
            finished=finished,
            prompt_tokens=self.prompted,
            generation_tokens=self.generated,
            num_blocks=100,
            num_free_blocks=100 - min(len(self.live), 100),
            num_slots=64,
            draining=self.draining,
            alive=self.alive,
        )

    def glance(self, take: Callable[[Glance], None]) -> bool:
        take(Glance(time.monotonic(), [], len(self.live), [], 0, [], PoolView(100, 100, 0, 0, 1, ""), False, 0.0))
        return self.alive

    def set_tenant_weights(self, weights: Mapping[str, float], default: float) -> None:
        self.tenant_weights = (dict(weights), default)

    async def drain(self, timeout_s: float) -> bool:
        self.draining = True
        end = time.monotonic() + timeout_s
        while self.live and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return not self.live

    def stop(self) -> None:
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self.stopped.set)
            time.sleep(0.02)
        self.alive = False


def fake_factory(prepare: Callable[[FakeEngine], None] = lambda engine: None) -> Callable[[Settings], FakeEngine]:
    """An engine factory; ``prepare`` may set the engine's pace, sleep as a loader would, or raise."""

    def make(settings: Settings) -> FakeEngine:
        engine = FakeEngine(settings)
        prepare(engine)
        return engine

    return make
