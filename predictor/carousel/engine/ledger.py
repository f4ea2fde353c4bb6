"""Who is in the engine, who has left and why: ``admitted == finished + cancelled + failed + live``, at every moment.

The one piece of engine state that several threads touch: clients' threads admit, the engine thread moves requests on,
scrapes read. Everything is behind one lock and nothing slow happens under it.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from carousel.engine.errors import EngineUnavailable, QueueFull
from carousel.engine.request import FinishReason
from carousel.engine.timeline import EngineStats, Refusal

RATE_WINDOW_S = 30.0
"""Over how long the drain rate of the queue is measured."""

MAX_RETRY_AFTER_S = 60.0

DEFAULT_WAIT_S = 5.0
"""What a refused client is told before any drain rate is known."""


@dataclass(slots=True, eq=False)
class Account:
    """What the ledger knows of one admitted request. Tokens are prompt tokens, sequences are choices."""

    num_sequences: int
    num_tokens: int
    arrival: float
    tenant: str = ""
    running: int = 0
    closed: bool = False


@dataclass(slots=True)
class Counters:
    """Monotonic counts that the engine thread reports once per step."""

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


@dataclass(slots=True)
class _Totals:
    admitted: int = 0
    refusals: dict[Refusal, int] = field(default_factory=lambda: dict.fromkeys(Refusal, 0))
    finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))


class Ledger:
    """Admission to the waiting queue, and the counts of everything.

    Args:
        max_queue_requests: requests that may wait beyond what the batch has seats for.
        max_queue_tokens: prompt tokens that may wait. A single request is let into an empty queue whatever its size.
        num_seats: sequences that the batch can hold.
        clock: seconds, monotonic.
        block_tokens: tokens of a KV block.
    """

    def __init__(
        self,
        max_queue_requests: int,
        max_queue_tokens: int,
        num_seats: int,
        clock: Callable[[], float] = time.monotonic,
        block_tokens: int = 16,
    ) -> None:
        self._max_requests = max_queue_requests
        self._max_tokens = max_queue_tokens
        self._num_seats = num_seats
        self._clock = clock
        self._block_tokens = block_tokens
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._totals = _Totals()
        self._waiting: dict[int, Account] = {}  # by id(), oldest first
        self._running: dict[int, Account] = {}
        self._waiting_tokens = 0
        self._waiting_of: dict[str, tuple[int, int]] = {}  # tenant -> its requests and tokens that wait
        self._sequences_running = 0
        # Of requests that left the queue: when, prompt tokens, how long the queue had stood still before.
        self._starts: deque[tuple[float, int, float]] = deque()
        self._still_since = 0.0  # when the queue last moved, or filled
        self._counters = Counters()
        self._blocks = (0, 0, 0)
        self._closed: str | None = None

    # ---- clients' side

    def admit(
        self, num_tokens: int, num_sequences: int, arrival: float, tenant: str = "", share: float = 1.0
    ) -> Account:
        """Let a request in, or say why not. Its tenant may fill ``share`` of the queue's bounds, or one place.

        Raises:
            QueueFull: a bound of the queue is reached; says how long the queue is expected to take.
            EngineUnavailable: the engine is draining or has stopped.
        """
        with self._lock:
            if self._closed is not None:
                self._totals.refusals[Refusal.UNAVAILABLE] += 1
                raise EngineUnavailable(self._closed)
            refusal, problem = Refusal.QUEUE_FULL, self._full(num_tokens)
            if problem is None and share < 1.0:
                refusal, problem = Refusal.QUEUE_SHARE, self._share_full(tenant, share, num_tokens)
            if problem is not None:
                self._totals.refusals[refusal] += 1
                # A rate measured over a moment says little: no client is sent away for longer than this.
                wait = min(self._queue_seconds(self._clock()), MAX_RETRY_AFTER_S)
                raise QueueFull(f"the model is overloaded: {problem}; try again in {math.ceil(wait)} s", wait)
            account = Account(num_sequences, num_tokens, arrival, tenant)
            self._totals.admitted += 1
            self._queue_up(account)
            return account

    def _full(self, num_tokens: int) -> str | None:
        """Which bound of the queue one more request would break."""
        if len(self._waiting) - self._empty_seats >= self._max_requests:
            return f"{len(self._waiting)} requests are waiting (limit {self._max_requests})"
        if self._waiting and self._waiting_tokens + num_tokens > self._max_tokens:
            return f"{self._waiting_tokens} prompt tokens are waiting (limit {self._max_tokens})"
        return None

    def _share_full(self, tenant: str, share: float, num_tokens: int) -> str | None:
        """Which bound of its tenant's share one more request would break."""
        requests, tokens = self._waiting_of.get(tenant, (0, 0))
        most, most_tokens = max(1, int(share * self._max_requests)), int(share * self._max_tokens)
        if requests - self._empty_seats >= most:
            return f"{requests} requests of tenant {tenant or '-'} are waiting (its share of the queue is {most})"
        if requests and tokens + num_tokens > most_tokens:
            return f"{tokens} prompt tokens of tenant {tenant or '-'} are waiting (its share is {most_tokens})"
        return None

    @property
    def _empty_seats(self) -> int:
        # Who arrives for an empty seat of the batch waits for the next step, and for nobody.
        return max(0, self._num_seats - self._sequences_running)

    def _queue_up(self, account: Account) -> None:
        if not self._waiting:
            self._still_since = self._clock()
        self._waiting[id(account)] = account
        self._count_waiting(account, 1)

    def _leave_queue(self, account: Account) -> bool:
        """Whether it stood there."""
        if self._waiting.pop(id(account), None) is None:
            return False
        self._count_waiting(account, -1)
        return True

    def _count_waiting(self, account: Account, sign: int) -> None:
        self._waiting_tokens += sign * account.num_tokens
        requests, tokens = self._waiting_of.pop(account.tenant, (0, 0))
        if requests + sign:
            self._waiting_of[account.tenant] = (requests + sign, tokens + sign * account.num_tokens)

    def count_rejected(self, why: Refusal = Refusal.INVALID) -> None:
        """A request was refused before it came to :meth:`admit`."""
        with self._lock:
            self._totals.refusals[why] += 1

    def close(self, why: str | None) -> None:
        """Refuse newcomers from now on, with this message (None: open again)."""
        with self._lock:
            self._closed = why

    @property
    def live(self) -> int:
        with self._lock:
            return len(self._waiting) + len(self._running)

    def wait_idle(self, timeout_s: float) -> bool:
        """Block until nothing is live, at most ``timeout_s`` seconds. Returns whether nothing is."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._waiting and not self._running, timeout_s)

    # ---- engine thread's side

    def started(self, account: Account) -> None:
        """One of the request's sequences took a seat."""
        with self._lock:
            self._sequences_running += 1
            account.running += 1
            if account.running == 1 and self._leave_queue(account):
                self._running[id(account)] = account
                now = self._clock()
                self._starts.append((now, account.num_tokens, now - self._still_since))
                self._still_since = now

    def stopped(self, account: Account, *, ended: bool) -> None:
        """One of the request's sequences lost its seat: it ended, or was preempted."""
        with self._lock:
            self._sequences_running -= 1
            account.running -= 1
            if account.running == 0 and not ended and self._running.pop(id(account), None) is not None:
                self._queue_up(account)

    def left(self, account: Account, reason: FinishReason) -> None:
        """The request has ended with all its choices."""
        with self._lock:
            if account.closed:
                return
            account.closed = True
            self._leave_queue(account)
            self._running.pop(id(account), None)
            self._totals.finished[reason] += 1
            if not self._waiting and not self._running:
                self._idle.notify_all()

    def report(self, counters: Counters, num_blocks: int, num_free: int, num_cached: int) -> None:
        """The engine thread's counts after a step."""
        with self._lock:
            self._counters = replace(counters)
            self._blocks = (num_blocks, num_free, num_cached)

    def report_blocks(self, num_blocks: int) -> None:
        """The size of the KV pool, before any step."""
        with self._lock:
            self._blocks = (num_blocks, num_blocks, 0)

    def reset(self) -> None:
        """Forget all that was counted while nobody was served."""
        with self._lock:
            if self._waiting or self._running:
                raise RuntimeError("requests are live")
            self._totals = _Totals()
            self._counters = Counters()
            self._starts.clear()
            self._blocks = (self._blocks[0], self._blocks[0], 0)

    # ---- readers

    def snapshot(self, *, draining: bool, alive: bool) -> EngineStats:
        """Everything at one moment."""
        with self._lock:
            now = self._clock()
            counters = self._counters
            num_blocks, num_free, num_cached = self._blocks
            return EngineStats(
                num_requests_running=len(self._running),
                num_requests_waiting=len(self._waiting),
                num_sequences_running=self._sequences_running,
                num_tokens_waiting=self._waiting_tokens,
                num_tokens_running=(num_blocks - num_free - num_cached) * self._block_tokens,
                oldest_wait_s=max((now - account.arrival for account in self._waiting.values()), default=0.0),
                queue_seconds=self._queue_seconds(now) if self._waiting else 0.0,
                admitted=self._totals.admitted,
                rejected=sum(self._totals.refusals.values()),
                refusals=dict(self._totals.refusals),
                finished=dict(self._totals.finished),
                prompt_tokens=counters.prompt_tokens,
                generation_tokens=counters.generation_tokens,
                recomputed_tokens=counters.recomputed_tokens,
                preemptions=counters.preemptions,
                prefix_cache_queries=counters.prefix_cache_queries,
                prefix_cache_hits=counters.prefix_cache_hits,
                steps=counters.steps,
                device_ns=counters.device_ns,
                slot_ns=counters.slot_ns,
                block_ns=counters.block_ns,
                num_blocks=num_blocks,
                num_free_blocks=num_free,
                num_cached_blocks=num_cached,
                num_slots=self._num_seats,
                draining=draining,
                alive=alive,
            )

    def _queue_seconds(self, now: float) -> float:
        """Waiting prompt tokens over the rate at which prompt tokens left the queue of late, while there was a queue.

        Time without a queue says nothing of what the engine can do, so it is not counted: a burst after a lull would
        else be thought to take minutes. A queue that has not moved for the whole window takes at least as long as its
        oldest request has waited already.
        """
        while self._starts and now - self._starts[0][0] > RATE_WINDOW_S:
            self._starts.popleft()
        started = sum(tokens for _, tokens, _ in self._starts)
        if not started:
            oldest = min((account.arrival for account in self._waiting.values()), default=now)
            return max(DEFAULT_WAIT_S, now - oldest)
        still = now - self._still_since if self._waiting else 0.0
        span = max(sum(stood for _, _, stood in self._starts) + still, 1.0)
        return max(self._waiting_tokens * span / started, 1.0)
