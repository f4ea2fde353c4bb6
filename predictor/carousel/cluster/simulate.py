"""Replicas, a gateway and an autoscaler in simulated time: what a scaling signal costs and what it lets wait.

The queue, its estimate, the signal and its damping are the product's own code (``engine.ledger``, ``demand``); the
engine is a model with measured rates, the HPA and KEDA are their documented algorithms:

- HPA (Kubernetes 1.34, metric of type External with AverageValue): every 15 s ``ceil(value / target)`` unless the
  ratio to the present replicas is within 0.1 of 1; scale-out at most the larger of 4 pods and 100 % per 15 s, scale-in
  to the largest recommendation of the stabilisation window.
- KEDA: between zero and one by activity, to one at once (push), to zero after the cooldown.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from carousel.cluster.demand import Damper, Fleet, Held, PodLoad, Targets, demand, total
from carousel.cluster.traces import Arrival
from carousel.engine.ledger import Account, Counters, Ledger
from carousel.engine.request import FinishReason

TICK_S = 0.1
SCRAPE_S = 2.0
HPA_S = 15.0
TOLERANCE = 0.1
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Rates:
    """What a replica can do: a decode step of ``b`` sequences takes ``step_s + b * sequence_s``."""

    seats: int = 16
    step_s: float = 0.0125
    sequence_s: float = 0.0035
    prefill_tokens_per_s: float = 700.0
    kv_tokens: int = 16_384


@dataclass(frozen=True, slots=True)
class Policy:
    """How replicas are decided.

    Attributes:
        signal: one of ``demand.MODES``, or ``waiting``: requests that wait, as many do it, with ``targets.requests``.
        targets: what a replica is worth.
        window_s: of the scaler's own damping.
        hpa_window_s: the HPA's scale-down stabilisation window.
        lowest: replicas at least.
        highest: replicas at most.
        cooldown_s: KEDA's, before zero.
    """

    signal: str
    targets: Targets
    window_s: float = 60.0
    hpa_window_s: float = 180.0
    lowest: int = 1
    highest: int = 20
    cooldown_s: float = 300.0

    def value(self, fleet: Fleet) -> float:
        if self.signal == "waiting":
            return fleet.requests_waiting + fleet.held.requests
        return demand(self.targets, fleet)

    @property
    def per_replica(self) -> float:
        return self.targets.requests if self.signal == "waiting" else self.targets.per_replica


@dataclass(slots=True)
class _Job:
    arrival: Arrival
    account: Account
    prefill_left: float = 0.0


class Replica:
    """A pod: ready some time after it was asked for, then a queue, seats and an engine of modelled speed."""

    def __init__(self, rates: Rates, created: float, ready_at: float) -> None:
        self.rates, self.created, self.ready_at = rates, created, ready_at
        self.leaving = False
        self.now = created
        self._ledger = Ledger(10**9, 10**12, rates.seats, clock=lambda: self.now, block_tokens=BLOCK)
        self._waiting: deque[_Job] = deque()
        self._prefilling: deque[_Job] = deque()
        self._decoding: list[tuple[float, int, _Job]] = []
        self._tokens = 0.0  # that each decoding sequence has got since the replica began
        self._order = 0
        self._blocks = 0
        self.first_tokens: list[tuple[Arrival, float]] = []

    def take(self, arrival: Arrival) -> None:
        """A request arrives."""
        account = self._ledger.admit(arrival.prompt, 1, self.now)
        self._waiting.append(_Job(arrival, account, float(arrival.prompt)))

    @property
    def busy(self) -> int:
        """Requests here."""
        return len(self._waiting) + len(self._prefilling) + len(self._decoding)

    @property
    def cost(self) -> int:
        """The pod-deletion cost."""
        return self._blocks * BLOCK + sum(job.arrival.prompt for job in self._waiting)

    def advance(self, now: float) -> None:
        """Work until ``now``."""
        span, self.now = now - self.now, now
        if not self.busy:
            return
        while self._waiting and len(self._prefilling) + len(self._decoding) < self.rates.seats:
            job = self._waiting.popleft()
            self._ledger.started(job.account)
            self._blocks += -(-(job.arrival.prompt + job.arrival.output) // BLOCK)
            self._prefilling.append(job)
        # A step holds prompt chunks beside decodes: with both, each gets half of the time.
        share = 0.5 if self._decoding else 1.0
        left = span * share
        while self._prefilling and left > 0:
            job = self._prefilling[0]
            done = min(job.prefill_left, left * self.rates.prefill_tokens_per_s)
            job.prefill_left -= done
            left -= done / self.rates.prefill_tokens_per_s
            if job.prefill_left <= 1e-9:
                self._prefilling.popleft()
                self.first_tokens.append((job.arrival, now))
                self._order += 1
                heapq.heappush(self._decoding, (self._tokens + job.arrival.output, self._order, job))
        spent = span * share - left
        if self._decoding:
            step_s = self.rates.step_s + self.rates.sequence_s * len(self._decoding)
            self._tokens += max(span - spent, 0.0) / step_s
        while self._decoding and self._decoding[0][0] <= self._tokens:
            self._end(heapq.heappop(self._decoding)[2])
        blocks = max(self.rates.kv_tokens // BLOCK, self._blocks)
        self._ledger.report(Counters(), blocks, blocks - self._blocks, 0)

    def _end(self, job: _Job) -> None:
        self._blocks -= -(-(job.arrival.prompt + job.arrival.output) // BLOCK)
        self._ledger.stopped(job.account, ended=True)
        self._ledger.left(job.account, FinishReason.LENGTH)

    def load(self) -> PodLoad:
        """What ``/load`` would say."""
        stats = self._ledger.snapshot(draining=self.leaving, alive=True)
        seats = stats.num_sequences_running / max(stats.num_slots, 1)
        return PodLoad(
            stats.num_requests_running,
            stats.num_requests_waiting,
            stats.num_tokens_running,
            stats.num_tokens_waiting,
            stats.queue_seconds,
            min(1.0, max(seats, stats.kv_cache_usage)),
            stats.admitted,
        )


@dataclass(slots=True)
class Outcome:
    """What came of a run. Times in seconds; ``events`` are changes of the wanted number of replicas."""

    requests: int
    replica_seconds: float
    first_token_s: list[float] = field(repr=False)
    events: int
    most: int
    timeline: list[tuple[float, int, int, float]] = field(repr=False)  # when, wanted, ready, requests waiting

    def missed(self, slo_s: float) -> float:
        """Share of requests whose first token came later than that."""
        late = sum(1 for seconds in self.first_token_s if seconds > slo_s)
        return late / max(len(self.first_token_s), 1)

    def quantile(self, share: float) -> float:
        """Of the time to first token."""
        ordered = sorted(self.first_token_s)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Hpa:
    """Kubernetes' horizontal autoscaler for one external metric, with KEDA in front of zero."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._down = Damper(policy.hpa_window_s)
        self._active_at = 0.0

    def wanted(self, now: float, value: float, current: int) -> int:
        """The replicas that a sync at ``now`` asks for."""
        policy = self._policy
        floor = max(policy.lowest, 1)
        if current == 0:
            return 0
        ratio = value / (policy.per_replica * current)
        raw = current if abs(ratio - 1) <= TOLERANCE else math.ceil(value / policy.per_replica)
        raw = min(max(raw, floor), policy.highest)
        self._down.add(now, raw)
        if raw >= current:
            return min(raw, max(current + 4, 2 * current))
        return min(current, int(self._down.value(now) or 0))

    def activity(self, now: float, active: bool, current: int) -> int:
        """KEDA's part: the replicas after it has looked at the activity."""
        if active:
            self._active_at = now
            return max(current, 1)
        idle = self._policy.lowest == 0 and now - self._active_at >= self._policy.cooldown_s
        return 0 if idle and current == 1 else current


class Simulation:
    """One run. Requests go to the ready replica with the fewest; without one they are held.

    Args:
        trace: arrivals, ordered.
        policy: how to scale.
        rates: of a replica.
        startup_s: from the decision to ready.
        warmup_s: nothing before this counts: neither requests nor replicas nor events.
    """

    def __init__(
        self, trace: Sequence[Arrival], policy: Policy, rates: Rates, startup_s: float, warmup_s: float = 0.0
    ) -> None:
        self._warmup_s = warmup_s
        self._answered = 0
        self._trace, self._policy, self._rates, self._startup_s = trace, policy, rates, startup_s
        self._replicas = [Replica(rates, 0.0, 0.0) for _ in range(policy.lowest)]
        self._wanted = policy.lowest
        self._held: deque[Arrival] = deque()
        self._damper = Damper(policy.window_s)
        self._hpa = Hpa(policy)
        self._busy_at = 0.0
        self._seconds = 0.0
        self._first: list[float] = []
        self._events = 0
        self._most = policy.lowest
        self._timeline: list[tuple[float, int, int, float]] = []

    def run(self, seconds: float) -> Outcome:
        """Replay the trace for ``seconds``, then until everything has its first token (an hour more at most)."""
        position, ticks = 0, 0
        scrapes, syncs = round(SCRAPE_S / TICK_S), round(HPA_S / TICK_S)
        while True:
            now = ticks * TICK_S
            while position < len(self._trace) and self._trace[position].at <= now:
                self._held.append(self._trace[position])
                position += 1
            self._advance(now)
            if ticks % scrapes == 0:
                self._look(now)
            if ticks % syncs == 0:
                self._set(now, self._hpa.wanted(now, self._damper.value(now) or 0.0, self._wanted))
            if now >= seconds and (self._answered == len(self._trace) or now >= seconds + 3600):
                break
            ticks += 1
        counted = sum(arrival.at >= self._warmup_s for arrival in self._trace)
        return Outcome(counted, self._seconds, self._first, self._events, self._most, self._timeline)

    def _ready(self, now: float) -> list[Replica]:
        return [replica for replica in self._replicas if replica.ready_at <= now and not replica.leaving]

    def _advance(self, now: float) -> None:
        ready = self._ready(now)
        while self._held and ready:
            min(ready, key=lambda replica: replica.busy).take(self._held.popleft())
        if now >= self._warmup_s:
            self._seconds += len(self._replicas) * TICK_S
        for replica in self._replicas:
            replica.advance(now)
            self._answered += len(replica.first_tokens)
            self._first += [when - it.at for it, when in replica.first_tokens if it.at >= self._warmup_s]
            replica.first_tokens.clear()
        self._replicas = [replica for replica in self._replicas if not replica.leaving or replica.busy]

    def _look(self, now: float) -> None:
        ready = self._ready(now)
        held = Held(len(self._held), sum(arrival.prompt for arrival in self._held))
        fleet = total((replica.load() for replica in ready), held=held)
        self._damper.add(now, self._policy.value(fleet))
        if fleet.live:
            self._busy_at = now
        active = self._policy.lowest > 0 or (fleet.live > 0 and bool(self._trace))
        self._set(now, self._hpa.activity(now, active, self._wanted))
        if now >= self._warmup_s:
            self._most = max(self._most, self._wanted)
        self._timeline.append((now, self._wanted, len(ready), fleet.requests_waiting + held.requests))

    def _set(self, now: float, wanted: int) -> None:
        if wanted == self._wanted:
            return
        self._wanted = wanted
        if now >= self._warmup_s:
            self._events += 1
        staying = [replica for replica in self._replicas if not replica.leaving]
        for _ in range(wanted - len(staying)):
            self._replicas.append(Replica(self._rates, now, now + self._startup_s))
        # Those that are not ready go first, then by their deletion cost, as a ReplicaSet has it.
        order = sorted(staying, key=lambda replica: (replica.ready_at <= now, replica.cost))
        for replica in order[: max(len(staying) - wanted, 0)]:
            replica.leaving = True


def simulate(
    trace: Sequence[Arrival],
    policy: Policy,
    rates: Rates = Rates(),
    startup_s: float = 20.0,
    seconds: float = 0.0,
    warmup_s: float = 0.0,
) -> Outcome:
    """Replay ``trace`` under ``policy``; ``seconds`` of 0 ends with the last arrival."""
    length = seconds or (trace[-1].at if trace else 0.0)
    return Simulation(trace, policy, rates, startup_s, warmup_s).run(length)
