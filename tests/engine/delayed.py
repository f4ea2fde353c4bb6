"""A device that is behind the host: what is launched runs in order, but as late as the test likes.

Everything that a step reads of the host's state is copied when it is launched, as a real device's copies are; the ids
that it samples are known to the host only after :meth:`DelayedDevice.wait`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.engine.fakes import Bench, FakeRunner, next_token

from carousel.engine.block_pool import BlockPool
from carousel.engine.request import FinishReason, Sequence
from carousel.engine.runner import StepResult
from carousel.engine.sampler import SampledToken
from carousel.engine.scheduler import Schedule
from carousel_kernels.layout import BLOCK_SIZE

Mark = tuple[int, int]
"""Which row wrote a cell: number of the step, order of the sequence."""


class DelayedDevice:
    """A stream of work. ``pace`` says at each launch how many pieces of what is queued get done meanwhile."""

    def __init__(self, pace: Callable[[], int] = lambda: 0) -> None:
        self._pace = pace
        self._queue: deque[Callable[[], None]] = deque()
        self._launched = self._done = 0

    def launch(self, work: Callable[[], None]) -> int:
        self._queue.append(work)
        self._launched += 1
        for _ in range(min(self._pace(), len(self._queue))):
            self._run()
        return self._launched

    def _run(self) -> None:
        self._queue.popleft()()
        self._done += 1

    def wait(self, ticket: int) -> None:
        while self._done < ticket:
            self._run()


@dataclass(eq=False)
class _Row:
    """What a step needs of an entry, copied at its launch."""

    mark: Mark
    sequence: Sequence
    start: int
    token_ids: list[int]
    pending: bool
    idle: bool
    samples: bool
    slots: list[int]

    @property
    def blocks(self) -> set[int]:
        return {slot // BLOCK_SIZE for slot in self.slots[self.start :]}


@dataclass(eq=False)
class _Work:
    """A step on the device; the stand-in for its logits and for its sampled ids."""

    rows: list[_Row]
    ticket: int = 0
    tokens: list[int] = field(default_factory=list)


class DelayedRunner(FakeRunner):
    """A fake runner and sampler whose steps run on a :class:`DelayedDevice`."""

    def __init__(self, pool: BlockPool, device: DelayedDevice) -> None:
        super().__init__(pool)
        self._device = device
        self._cells: dict[int, tuple[int, int, Mark]] = {}  # slot -> token, position, who wrote it
        self._fed: dict[int, int] = {}  # sequence.order -> its last token
        self.in_flight: list[_Work] = []
        self.rows: list[_Row] = []
        self.reads: set[tuple[Mark, Mark]] = set()  # reader, writer

    # ---- the runner

    def run(self, step: Schedule) -> StepResult:
        self.check_entries(step)
        self.steps.append(step)
        rows = []
        for entry in step.entries:
            slots = [self._slot(entry.sequence, position) for position in range(entry.end)]
            mark = (len(self.steps), entry.sequence.order)
            token_ids, facts = list(entry.token_ids), (entry.pending, entry.idle, entry.samples)
            rows.append(_Row(mark, entry.sequence, entry.start, token_ids, *facts, slots))
        self.rows += rows
        work = _Work(rows)
        self.in_flight.append(work)
        work.ticket = self._device.launch(lambda: self._compute(work))
        sampled = [row.sequence for row in rows if row.samples]
        return StepResult(sampled, work, [], done=None if sampled else _Draw(self, work))  # type: ignore[arg-type]

    def feed(self, sequences: list[Sequence], tokens: object) -> None:
        assert isinstance(tokens, _Work)
        orders = [sequence.order for sequence in sequences]
        work = tokens

        def remember() -> None:
            self._fed.update(zip(orders, work.tokens, strict=True))

        self._device.launch(remember)

    def _compute(self, work: _Work) -> None:
        for row in work.rows:
            tokens = [self._fed[row.sequence.order]] if row.pending else row.token_ids
            for position, token in enumerate(tokens, row.start):
                self._cells[row.slots[position]] = (token, position, row.mark)
        for row in work.rows:
            if row.idle:
                continue
            context = []
            for position, slot in enumerate(row.slots):
                token, written_for, writer = self._cells[slot]
                assert written_for == position, "attention read another position's slot"
                self.reads.add((row.mark, writer))
                context.append(token)
            if row.samples:
                work.tokens.append(next_token(context))

    # ---- the sampler

    def launch(self, logits: object, sequences: list[Sequence], last_tokens: object = None) -> _Draw:
        assert isinstance(logits, _Work)
        return _Draw(self, logits)

    def launch_prompt(self, logits: object, token_ids: list[int], k: int) -> None:
        raise AssertionError("no logits here")

    def wait(self, work: _Work) -> list[SampledToken]:
        self._device.wait(work.ticket)
        assert self.in_flight.pop(0) is work, "steps are collected in the order of their launch"
        return [SampledToken(token, None) for token in work.tokens]

    # ---- what must hold

    def check(self, pool: BlockPool) -> None:
        """No block that a step in flight writes may be taken by anybody, nor be found by its content while its row may
        turn out to be for nothing."""
        for work in self.in_flight:
            for row in work.rows:
                assert all(pool._references[block] == 1 for block in row.blocks if row.pending)

    def check_reads(self, bench: Bench) -> None:
        """Once all is over: nothing that a discarded row wrote was read, but by rows discarded with it."""
        void = {row.mark for row in self.rows if row.pending and _discarded(row, bench)}
        for reader, writer in self.reads:
            assert writer not in void or reader in void, "a discarded row's write was read"


def _discarded(row: _Row, bench: Bench) -> bool:
    """Whether the row's input, which was pending, turned out to be a last token, or was never handed out."""
    sequence = row.sequence
    reason = bench.outputs[sequence.request.request_id, sequence.index].finish_reason
    last = len(sequence.token_ids) - 1
    return row.start > last or (row.start == last and reason in (FinishReason.EOS, FinishReason.STOP))


class _Draw:
    """Stands for ``sampler.Draw``."""

    def __init__(self, runner: DelayedRunner, work: _Work) -> None:
        self._runner = runner
        self.tokens = work

    def wait(self) -> list[SampledToken]:
        return self._runner.wait(self.tokens)
