"""What each request takes of the engine: tokens, slots, KV memory and time of the device, to the nanosecond.

A step that took ``T`` nanoseconds is divided among the sequences in it. Of each kind there is a total, which is counted
first, and shares of it, which add up to it exactly:

device
    ``T``, in proportion to the work of each sequence's tokens: ``token * new tokens + pair * attended pairs``, with the
    multiplications that a token takes in the linear layers and a query-key pair in attention (:class:`Work`).
slots
    ``T`` for each sequence that has a seat of the batch.
KV blocks
    ``T`` for each block that is held, in proportion to what each sequence holds; of a block that ``k`` sequences share
    each holds a ``k``-th.

Shares are whole nanoseconds by the largest remainder: each gets its share rounded down, and what is left over goes,
one each, to those who lost most by it. Idle rows and memory of a static batch are paid by the sequences that still run.
Time between two steps belongs to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from carousel.engine.cost_model import attended
from carousel.engine.request import FinishReason

if TYPE_CHECKING:
    from carousel.engine.block_pool import BlockPool
    from carousel.engine.loop import LiveRequest
    from carousel.engine.request import Sequence as Row
    from carousel.engine.scheduler import Schedule
    from carousel.models.families import DecoderConfig

WHOLE_BLOCK = 720_720
"""A block in parts that 1 to 16 sharers divide without a rest."""


@dataclass(frozen=True, slots=True)
class Work:
    """Multiplications that a step takes: ``token`` for each new token, ``pair`` for each query-key pair."""

    token: int = 1024
    pair: int = 1


def work_of(config: DecoderConfig) -> Work:
    """The multiplications of a decoder, without its last layer's vocabulary, which only sampled rows take, and as if no
    layer had a window."""
    width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = config.hidden_size * (2 * width + 2 * kv_width + 3 * config.intermediate_size)
    return Work(config.num_layers * layer, config.num_layers * 2 * width)


@dataclass(slots=True)
class Amounts:
    """What somebody took. Times in nanoseconds; ``block_ns`` is blocks times nanoseconds, ``slot_ns`` likewise.

    ``prompt_tokens`` counts a prompt once, whatever its choices, from its first step on; ``cached_tokens`` what
    was found in the prefix cache, for each choice; ``recomputed_tokens`` what preemptions made compute again.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    recomputed_tokens: int = 0
    device_ns: int = 0
    slot_ns: int = 0
    block_ns: int = 0

    def add(self, other: Amounts) -> None:
        """Count another's, too."""
        for name in AMOUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


AMOUNTS = tuple(item.name for item in fields(Amounts))
"""The names of what is counted."""


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """What one request, with all its choices, took. Written once, when the last step that it was in is over."""

    request_id: str
    tenant: str
    finish_reason: FinishReason
    num_choices: int
    num_preemptions: int
    queue_s: float | None
    ttft_s: float | None
    e2e_s: float
    amounts: Amounts


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """Whole shares of ``total`` in proportion to ``weights``, which add up to it exactly (largest remainder).

    Weights of nothing but zeros count as equal. Equal remainders are served in the order of the list.
    """
    if not weights:
        return []
    whole = sum(weights)
    if not whole:
        return apportion(total, [1] * len(weights))
    shares, rests = [], []
    for weight in weights:
        share, rest = divmod(total * weight, whole)
        shares.append(share)
        rests.append(rest)
    left = total - sum(shares)
    if left:
        for index in sorted(range(len(rests)), key=lambda i: -rests[i])[:left]:
            shares[index] += 1
    return shares


@dataclass(slots=True)
class StepShares:
    """Who takes part in a step, as it was launched, by the sequences' order: the weights of what it will have taken."""

    recomputed: dict[int, int]
    work: dict[int, int]
    seats: list[int]
    blocks: dict[int, int]
    num_held_blocks: int


@dataclass(slots=True)
class _Row:
    """Of a sequence. ``open_steps``: steps that are not over, and of which it will pay a part."""

    open_steps: int = 0
    recomputed_tokens: int = 0
    device_ns: int = 0
    slot_ns: int = 0
    block_ns: int = 0


class Meter:
    """Divides steps among requests. Owned by the engine thread.

    Args:
        work: of the model.
        emit: takes each request's usage, once.
    """

    def __init__(self, work: Work, emit: Callable[[RequestUsage], None]) -> None:
        self._work = work
        self._emit = emit
        self.device_ns = self.slot_ns = self.block_ns = 0
        self._rows: dict[int, _Row] = {}
        self._weights: dict[int, tuple[int, int, int]] = {}  # order -> the pool's sharing, blocks, what they weigh
        self._closing: list[tuple[LiveRequest, float]] = []  # ended, and when

    def reset(self) -> None:
        """Forget all that was counted (after a warm-up)."""
        self.device_ns = self.slot_ns = self.block_ns = 0
        self._rows.clear()
        self._weights.clear()
        self._closing.clear()

    def launched(
        self, schedule: Schedule, seated: Sequence[Row], holders: Sequence[Row], pool: BlockPool
    ) -> StepShares:
        """A step begins. ``seated`` have a place in the batch; they and ``holders`` have KV blocks."""
        recomputed: dict[int, int] = {}
        work: dict[int, int] = {}
        for entry in schedule.entries:
            if entry.idle:
                continue
            sequence = entry.sequence
            count = entry.num_new_tokens
            weight = self._work.token * count + self._work.pair * attended(count, entry.start)
            work[sequence.order] = work.get(sequence.order, 0) + weight
            again = min(entry.end, sequence.num_lost_tokens) - entry.start
            if again > 0:
                recomputed[sequence.order] = recomputed.get(sequence.order, 0) + again
        seats = [sequence.order for sequence in seated]
        if not work:  # nothing but idle rows
            work = dict.fromkeys(seats, 1)
        blocks = {sequence.order: self._held(sequence, pool) for sequence in (*seated, *holders)}
        for order in blocks:  # whoever works has blocks
            row = self._rows.get(order)
            if row is None:
                row = self._rows[order] = _Row()
            row.open_steps += 1
        return StepShares(recomputed, work, seats, blocks, pool.num_blocks - pool.num_available)

    def _held(self, sequence: Row, pool: BlockPool) -> int:
        """What a sequence's blocks weigh. While nobody begins or ceases to share any, that only grows by whole ones."""
        table = sequence.block_table
        sharing, length, weight = self._weights.get(sequence.order, (-1, 0, 0))
        if sharing == pool.sharing:
            weight += (len(table) - length) * WHOLE_BLOCK
        else:
            weight = pool.held(table, WHOLE_BLOCK)
        self._weights[sequence.order] = (pool.sharing, len(table), weight)
        return weight

    def collected(self, shares: StepShares, duration_ns: int) -> None:
        """The step is over, and took this long."""
        rows = self._rows
        for order in shares.blocks:
            rows[order].open_steps -= 1
        for order, tokens in shares.recomputed.items():
            rows[order].recomputed_tokens += tokens
        for order, share in zip(shares.work, apportion(duration_ns, list(shares.work.values())), strict=True):
            rows[order].device_ns += share
        self.device_ns += duration_ns if shares.work else 0
        for order in shares.seats:
            rows[order].slot_ns += duration_ns
        self.slot_ns += duration_ns * len(shares.seats)
        if shares.blocks:
            total = duration_ns * shares.num_held_blocks
            self.block_ns += total
            for order, share in zip(shares.blocks, apportion(total, list(shares.blocks.values())), strict=True):
                rows[order].block_ns += share

    def ended(self, live: LiveRequest, now: float) -> None:
        """A request has ended. It is accounted for at the next :meth:`settle` at which no step holds it."""
        self._closing.append((live, now))

    def settle(self, *, finally_: bool = False) -> None:
        """Account for the requests that have ended and are in no step any more; ``finally_``: for all that have."""
        if not self._closing:
            return
        kept = []
        for live, ended_at in self._closing:
            if not finally_ and any(self._open(sequence) for sequence in live.sequences):
                kept.append((live, ended_at))
            else:
                self._emit(self._usage(live, ended_at))
        self._closing = kept

    def _open(self, sequence: Row) -> bool:
        row = self._rows.get(sequence.order)
        return row is not None and row.open_steps > 0

    def _usage(self, live: LiveRequest, ended_at: float) -> RequestUsage:
        request, sequences = live.request, live.sequences
        amounts = Amounts(
            prompt_tokens=0 if sequences[0].admitted_at is None else sequences[0].num_prompt_tokens,
            cached_tokens=sum(sequence.num_cached_tokens for sequence in sequences),
            generated_tokens=sum(sequence.num_output_tokens for sequence in sequences),
        )
        for sequence in sequences:
            self._weights.pop(sequence.order, None)
            row = self._rows.pop(sequence.order, None)
            if row is not None:
                amounts.recomputed_tokens += row.recomputed_tokens
                amounts.device_ns += row.device_ns
                amounts.slot_ns += row.slot_ns
                amounts.block_ns += row.block_ns
        seated = min((s.admitted_at for s in sequences if s.admitted_at is not None), default=None)
        first = min((s.first_token_at for s in sequences if s.first_token_at is not None), default=None)
        return RequestUsage(
            request_id=request.request_id,
            tenant=request.tenant,
            finish_reason=live.reason or FinishReason.ERROR,
            num_choices=len(sequences),
            num_preemptions=sum(sequence.num_preemptions for sequence in sequences),
            queue_s=None if seated is None else seated - request.arrival,
            ttft_s=None if first is None else first - request.arrival,
            e2e_s=ended_at - request.arrival,
            amounts=amounts,
        )
