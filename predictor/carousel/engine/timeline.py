"""What every iteration did, and how every request went: the one source of metrics, traces and the live page.

The engine thread writes; anybody may read. Records are plain data and never change once written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from carousel.engine.request import FinishReason

if TYPE_CHECKING:
    from carousel.engine.events import Event, Watcher
    from carousel.engine.meter import RequestUsage


class SeatUse(StrEnum):
    """What a sequence's seat was used for in a step."""

    PREFILL = "prefill"  # prompt tokens, or tokens that a preemption had thrown away
    DECODE = "decode"
    IDLE = "idle"  # a static batch kept the seat, or padded the prompt
    LOST = "lost"  # preempted: from here on the seat is another's


class Seat(NamedTuple):
    """A choice of a request, and the tokens that a step computed for it."""

    request_id: str
    choice: int
    use: SeatUse
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One iteration of the engine. Times in seconds (``started``: ``time.monotonic``), counts in tokens or sequences.

    ``schedule_s``, ``run_s`` and ``sample_s`` are its parts; ``num_recomputed_tokens`` counts tokens that had been
    computed before and were lost to a preemption; ``num_idle_tokens`` rows that a static batch computed for nothing;
    ``num_discarded_tokens`` were sampled for sequences that turned out to have ended before. Where the host runs ahead
    of the device a step's time begins with the end of the step before, and ``sample_s`` is part of ``run_s``.
    ``kv_cache_usage`` is the share of KV blocks that live sequences hold after it. ``num_left_tokens`` are prompt
    tokens of sequences in the batch that the step had no room for; ``obstacle`` is what kept the first in the queue out
    of it (an ``events.Reason``). ``seats`` is empty unless :attr:`Timeline.record_seats` is set.
    """

    index: int
    started: float
    duration_s: float
    schedule_s: float
    run_s: float
    sample_s: float
    num_sequences: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_recomputed_tokens: int
    num_sampled_tokens: int
    num_preemptions: int
    num_running: int
    num_waiting: int
    num_idle_tokens: int = 0
    num_discarded_tokens: int = 0
    kv_cache_usage: float = 0.0
    num_left_tokens: int = 0
    obstacle: str = ""
    seats: tuple[Seat, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens

    @property
    def kind(self) -> str:
        """``decode``, ``prefill`` or ``mixed``."""
        if not self.num_prefill_tokens:
            return "decode"
        return "mixed" if self.num_decode_tokens else "prefill"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request (all its ``n`` choices) once it has left the engine. Times in seconds.

    ``queue_s``: arrival to first scheduled. ``prefill_s``: first scheduled to first token. ``decode_s``: first to last
    token. None where the request never got that far. ``output_tokens`` sums over the choices; ``tpot_s`` is the mean
    over choices of decode time per token after the first.
    """

    request_id: str
    tenant: str
    finish_reason: FinishReason
    num_choices: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_preemptions: int
    e2e_s: float
    queue_s: float | None = None
    ttft_s: float | None = None
    prefill_s: float | None = None
    decode_s: float | None = None
    tpot_s: float | None = None
    max_tokens: int | None = None


class Observer(Protocol):
    """Told of what happens, on the engine thread: be quick, never raise."""

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        """After each iteration; ``token_latencies_s`` holds, per token published, the seconds since the one before."""

    def on_finish(self, request: RequestRecord) -> None:
        """When a request has left, for whatever reason."""


class Refusal(StrEnum):
    """Why a request was not admitted."""

    INVALID = "invalid"
    TOO_LONG = "too_long"
    QUEUE_FULL = "queue_full"
    QUEUE_SHARE = "queue_share"  # the tenant's part of the queue is full
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A consistent snapshot of the engine. Counters only grow; ``admitted == finished + cancelled + failed + live``.

    ``num_requests_*`` count requests, ``num_sequences_*`` choices. ``finished`` maps each finish reason to a count of
    requests, ``refusals`` each reason to its part of ``rejected``. ``queue_seconds`` estimates how long a request that
    arrives now would wait. ``num_tokens_running`` is what the live sequences' KV blocks hold, rounded up to blocks.
    ``*_ns``: see ``meter``.
    """

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_sequences_running: int = 0
    num_tokens_waiting: int = 0
    num_tokens_running: int = 0
    oldest_wait_s: float = 0.0
    queue_seconds: float = 0.0
    admitted: int = 0
    rejected: int = 0
    finished: dict[FinishReason, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    steps: int = 0
    device_ns: int = 0
    slot_ns: int = 0
    block_ns: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_slots: int = 0
    refusals: dict[Refusal, int] = field(default_factory=dict)
    draining: bool = False
    alive: bool = True

    @property
    def live(self) -> int:
        """Requests that are in the engine now."""
        return self.num_requests_running + self.num_requests_waiting

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that live sequences hold, 0 to 1."""
        return (self.num_blocks - self.num_free_blocks - self.num_cached_blocks) / max(self.num_blocks, 1)


class Timeline:
    """Keeps the last ``capacity`` steps and tells the observers; tells watchers more, while there are any.
    ``meters`` are told what each request took.

    Attributes:
        record_seats: whether steps say who took part in them; set it before the requests that matter.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self.record_seats = False
        self.steps: deque[StepRecord] = deque(maxlen=capacity)
        self.observers: list[Observer] = []
        self.meters: list[Callable[[RequestUsage], None]] = []  # on the engine thread: be quick, never raise
        self.watchers: tuple[Watcher, ...] = ()  # replaced as a whole: the engine thread reads it

    def watch(self, watcher: Watcher) -> None:
        """Tell ``watcher`` of every event from now on. To be called on one thread only, as :meth:`unwatch`."""
        self.watchers = (*self.watchers, watcher)

    def unwatch(self, watcher: Watcher) -> None:
        self.watchers = tuple(other for other in self.watchers if other is not watcher)

    def tell(self, events: list[Event], step: StepRecord | None) -> None:
        for watcher in self.watchers:
            watcher.on_events(events, step)

    def record_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        self.steps.append(step)
        for observer in self.observers:
            observer.on_step(step, token_latencies_s)

    def record_usage(self, usage: RequestUsage) -> None:
        for meter in self.meters:
            meter(usage)

    def record_request(self, request: RequestRecord) -> None:
        for observer in self.observers:
            observer.on_finish(request)
