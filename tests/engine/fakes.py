"""A model that is a hash function, with a KV cache that is an array of tokens.

The next token depends on every token of the context *as read through the block table*, so any mistake in the block
pool's, the prefix cache's or the scheduler's bookkeeping changes the text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from itertools import count
from typing import Any

import torch

from carousel.engine.block_pool import BlockPool
from carousel.engine.detokenizer import Detokenizer
from carousel.engine.ledger import Ledger
from carousel.engine.loop import EngineCore, LiveRequest
from carousel.engine.policy import make_policy
from carousel.engine.request import FinishReason, GenerationRequest, Output, Sequence, SequenceStatus
from carousel.engine.runner import StepResult
from carousel.engine.sampler import Sampler, SamplerLike, SequenceSampler
from carousel.engine.scheduler import Schedule, Scheduler, SchedulerLimits
from carousel.engine.timeline import RequestRecord, StepRecord, Timeline
from carousel_kernels.layout import BLOCK_SIZE

VOCAB = 64
EOS = 1


def next_token(tokens: list[int]) -> int:
    """The fake model: what follows ``tokens``."""
    return hashlib.blake2b(bytes(tokens), digest_size=2).digest()[0] % VOCAB


class FakeTokenizer:
    vocab_size = VOCAB
    eos_ids = frozenset({EOS})

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(48 + token) for token in ids if token != EOS or not skip_special_tokens)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [(ord(character) - 48) % VOCAB for character in text]


TOKENIZER = FakeTokenizer()


class FakeRunner:
    """Keeps (token, position) per KV slot and computes :func:`next_token` of what it finds there."""

    def __init__(self, pool: BlockPool) -> None:
        self.kv: list[tuple[int, int] | None] = [None] * (pool.num_blocks * BLOCK_SIZE)
        self.steps: list[Schedule] = []

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    @staticmethod
    def check_entries(step: Schedule) -> None:
        for entry in step.entries:
            assert entry.num_new_tokens > 0
            padding = entry.idle and entry.sequence.status is SequenceStatus.RUNNING
            assert padding or entry.start == entry.sequence.num_computed_tokens - (1 if entry.idle else 0)
            assert not padding or entry.start >= entry.sequence.num_tokens

    def feed(self, sequences: list[Sequence], tokens: torch.Tensor) -> None:
        raise AssertionError("the host knows every token before the next step")

    def run(self, step: Schedule) -> StepResult:
        self.check_entries(step)
        self.steps.append(step)
        for entry in step.entries:
            for position, token in enumerate(entry.token_ids, entry.start):
                self.kv[self._slot(entry.sequence, position)] = (token, position)
        sampled, rows = [], []
        for entry in step.entries:
            if entry.idle:
                continue  # nobody looks at what it gives
            context = []
            for position in range(entry.end):
                cell = self.kv[self._slot(entry.sequence, position)]
                assert cell is not None, "attention read a slot that nobody wrote"
                assert cell[1] == position, "attention read another position's slot"
                context.append(cell[0])
            if entry.samples:
                sampled.append(entry.sequence)
                rows.append(next_token(context))
        logits = torch.zeros(len(rows), VOCAB)
        for row, token in enumerate(rows):
            logits[row, token] = 10.0
        return StepResult(sampled, logits, [])

    def check(self, pool: BlockPool) -> None:
        """What else must hold between two steps."""


class Recorder:
    """Remembers what the timeline said."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []
        self.requests: list[RequestRecord] = []

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        self.steps.append(step)

    def on_finish(self, request: RequestRecord) -> None:
        self.requests.append(request)


class Bench:
    """An engine core on the fake model with a clock that the test turns, and everything it published."""

    def __init__(
        self,
        num_blocks: int = 64,
        max_batch_tokens: int = 32,
        max_batch_sequences: int = 4,
        policy: str = "fcfs",
        tenant_weights: dict[str, float] | None = None,
        prefix_caching: bool = True,
        static: bool = False,
        depth: int = 0,
        delayed: Callable[[BlockPool], Any] | None = None,
    ) -> None:
        self.now = 0.0
        self.pool = BlockPool(num_blocks)
        limits = SchedulerLimits(max_batch_tokens, max_batch_sequences, 0.0, prefix_caching, static)
        self.scheduler = Scheduler(limits, self.pool, make_policy(policy, tenant_weights))
        self.ledger = Ledger(10**6, 10**9, max_batch_sequences, clock=lambda: self.now)
        sampler: SamplerLike = Sampler(VOCAB, torch.device("cpu"))
        self.runner = FakeRunner(self.pool)
        if delayed is not None:
            self.runner = sampler = delayed(self.pool)  # both in one
        timeline = Timeline()
        self.recorder = Recorder()
        timeline.observers.append(self.recorder)
        self.core = EngineCore(
            self.scheduler,
            self.runner,
            sampler,
            self.ledger,
            timeline,
            self._publish,
            clock=lambda: self.now,
            depth=depth,
        )
        self.outputs: dict[tuple[str, int], Output] = {}
        self.finish_order: list[str] = []
        self._orders = count()

    def _publish(self, deltas: list[tuple[LiveRequest, Output]]) -> None:
        for live, output in deltas:
            key = (live.request.request_id, output.index)
            if key in self.outputs:
                assert self.outputs[key].finish_reason is None, "a delta after the last one"
                self.outputs[key].merge(output)
            else:
                self.outputs[key] = output
            if output.finish_reason is not None:
                self.finish_order.append(live.request.request_id)

    def submit(self, request: GenerationRequest, expires_at: float | None = None) -> LiveRequest:
        prompt = list(request.prompt)
        assert all(isinstance(token, int) for token in prompt)
        params = request.sampling
        account = self.ledger.admit(len(prompt), params.n, request.arrival, request.tenant, request.queue_share)
        sequences = [
            Sequence(
                request=request,
                index=index,
                token_ids=list(prompt),
                num_prompt_tokens=len(prompt),
                max_total_tokens=len(prompt) + (params.max_tokens or 16),
                order=next(self._orders),
                detokenizer=Detokenizer(TOKENIZER, stop=params.stop),
                sampler=SequenceSampler(
                    params, seed=0, index=index, prompt_ids=prompt, eos_ids=frozenset({EOS}), vocab_size=VOCAB
                ),
                eos_ids=frozenset({EOS}),
            )
            for index in range(params.n)
        ]
        live = LiveRequest(request, account, sequences, expires_at)
        self.core.add(live)
        return live

    def step(self) -> bool:
        self.now += 1.0
        worked = self.core.step()
        self.check()
        return worked

    def run(self, max_steps: int = 100_000) -> int:
        """Step until nothing is live; returns the number of steps."""
        for steps in range(max_steps):
            if not self.step():
                return steps
        raise AssertionError("the engine does not come to an end")

    def check(self) -> None:
        """Everything that must hold between two steps."""
        running = self.scheduler.running
        assert self.scheduler.limits.static or not self.scheduler.idle
        assert running or not self.scheduler.idle, "a static group outlives its last sequence"
        leaving = self.scheduler.leaving
        assert all(sequence.finished and sequence.num_in_flight for sequence in leaving)
        self.pool.check(sequence.block_table for sequence in running + self.scheduler.idle + leaving)
        self.runner.check(self.pool)
        assert len(running) <= self.scheduler.limits.max_batch_sequences
        assert all(not sequence.block_table for sequence in self.scheduler.policy)
        stats = self.ledger.snapshot(draining=False, alive=True)
        assert stats.admitted == sum(stats.finished.values()) + stats.live
        assert stats.num_sequences_running == len(running)

    def text(self, request_id: str, index: int = 0) -> str:
        return self.outputs[request_id, index].text


def expected(request: GenerationRequest) -> tuple[list[int], FinishReason]:
    """What the fake model answers when it serves ``request`` alone, by the definition of greedy decoding."""
    tokens = list(request.prompt)
    output: list[int] = []
    while True:
        token = next_token([int(t) for t in tokens])
        tokens.append(token)
        output.append(token)
        if token == EOS and not request.sampling.ignore_eos:
            return output, FinishReason.EOS
        if len(output) == (request.sampling.max_tokens or 16):
            return output, FinishReason.LENGTH
