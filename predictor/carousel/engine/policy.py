"""Who goes next, and who goes last: the order of the waiting queue, and of the running batch when memory runs out.

A policy is a total order of sequences. The scheduler takes the best waiting sequence first and preempts the worst
running one first; since a preempted sequence keeps its key, it also keeps its place.

- ``fcfs``: by arrival.
- ``priority``: by the request's priority (lower first), then arrival; a waiting sequence may preempt a running one of
  strictly worse priority.
- ``deadline``: earliest first-token objective first (EDF); requests without one come last, by arrival.
- ``fair``: the tenant with the least service goes first. Service is counted in weighted tokens, as the Virtual Token
  Counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): a tenant's counter grows by
  ``tokens / weight``, and one who comes back from idleness is lifted to the least counter of the active ones, so that
  nobody saves up credit. Within a tenant, by priority and then arrival.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping

from carousel.engine.request import Sequence

Key = tuple[float, ...]

PROMPT_TOKEN_COST = 1.0
OUTPUT_TOKEN_COST = 2.0
"""The prices of the VTC paper: an output token costs a whole step of the batch, a prompt token only its share."""


class Policy(ABC):
    """A waiting queue with an order. Not thread-safe: the engine thread owns it."""

    @abstractmethod
    def key(self, sequence: Sequence) -> Key:
        """The sequence's place: smaller goes first. Unique, as it ends with the order of arrival."""

    @abstractmethod
    def push(self, sequence: Sequence) -> None:
        """Put a new or preempted sequence where its key says."""

    @abstractmethod
    def pop(self) -> Sequence | None:
        """Take the best waiting sequence out, or None."""

    @abstractmethod
    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out wherever it stands (cancelled, timed out)."""

    @abstractmethod
    def __len__(self) -> int:
        """How many sequences wait."""

    @abstractmethod
    def __iter__(self) -> Iterator[Sequence]:
        """The waiting sequences, in no particular order."""

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether ``waiting`` is worth throwing ``running`` out of a full batch."""
        return False

    def arrive(self, sequence: Sequence) -> None:  # noqa: B027 - most policies do not care
        """Told once when a sequence enters the engine, before its first :meth:`push`."""

    def leave(self, sequence: Sequence) -> None:  # noqa: B027
        """Told once when a sequence has left the engine for good."""

    def charge(self, sequence: Sequence, prompt_tokens: int, output_tokens: int) -> None:  # noqa: B027
        """Told after each step what a sequence was given."""

    def set_weights(self, weights: Mapping[str, float], default: float = 1.0) -> None:  # noqa: B027
        """Shares of tenants, and of those that are not named. Only a policy of shares cares."""


class _Queue:
    """A heap of (key, sequence) whose removed entries are skipped when they surface."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Sequence]] = []
        self._present: dict[int, Sequence] = {}  # by order, which is unique

    def push(self, key: Key, sequence: Sequence) -> None:
        self._present[sequence.order] = sequence
        heapq.heappush(self._heap, (key, sequence))

    def _settle(self) -> None:
        while self._heap and self._heap[0][1].order not in self._present:
            heapq.heappop(self._heap)

    def head(self) -> Sequence | None:
        self._settle()
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence | None:
        self._settle()
        if not self._heap:
            return None
        _, sequence = heapq.heappop(self._heap)
        del self._present[sequence.order]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        if self._present.pop(sequence.order, None) is not None and len(self._heap) > 2 * len(self._present) + 16:
            # Mass cancellation: rebuild rather than keep the dead alive.
            self._heap = [entry for entry in self._heap if entry[1].order in self._present]
            heapq.heapify(self._heap)

    def __len__(self) -> int:
        return len(self._present)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._present.values()))


class _KeyedPolicy(Policy):
    """A policy whose keys never change while a sequence lives: one heap does."""

    def __init__(self) -> None:
        self._queue = _Queue()

    def push(self, sequence: Sequence) -> None:
        self._queue.push(self.key(sequence), sequence)

    def pop(self) -> Sequence | None:
        return self._queue.pop()

    def remove(self, sequence: Sequence) -> None:
        self._queue.remove(sequence)

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)


class FirstComeFirstServed(_KeyedPolicy):
    def key(self, sequence: Sequence) -> Key:
        return (sequence.order,)


class PriorityFirst(_KeyedPolicy):
    def key(self, sequence: Sequence) -> Key:
        return (sequence.request.priority, sequence.order)

    def may_preempt(self, waiting: Sequence, running: Sequence) -> bool:
        return waiting.request.priority < running.request.priority


class EarliestDeadlineFirst(_KeyedPolicy):
    def key(self, sequence: Sequence) -> Key:
        request = sequence.request
        due = math.inf if request.deadline_s is None else request.arrival + request.deadline_s
        return (due, sequence.order)


class FairShare(Policy):
    """Virtual token counters per tenant, with weights (a tenant with weight 2 is owed twice the tokens)."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        self._default_weight = 1.0
        self._counters: dict[str, float] = {}
        self._queues: dict[str, _Queue] = {}
        self._active: dict[str, int] = {}  # tenant -> sequences waiting or running

    def _tenant(self, sequence: Sequence) -> str:
        return sequence.request.tenant

    def key(self, sequence: Sequence) -> Key:
        return (self._counters.get(self._tenant(sequence), 0.0), *self._rank(sequence))

    @staticmethod
    def _rank(sequence: Sequence) -> Key:
        return (sequence.request.priority, sequence.order)

    def set_weights(self, weights: Mapping[str, float], default: float = 1.0) -> None:
        self._weights, self._default_weight = dict(weights), default

    def arrive(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence)
        if tenant not in self._active:
            floor = min((self._counters[other] for other in self._active), default=math.inf)
            # Whoever is idle and owes nothing is forgotten, so that tenants' names do not pile up.
            self._counters = {t: c for t, c in self._counters.items() if t in self._active or c > floor}
            self._counters[tenant] = max(self._counters.get(tenant, 0.0), 0.0 if floor == math.inf else floor)
        self._active[tenant] = self._active.get(tenant, 0) + 1

    def leave(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence)
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]

    def push(self, sequence: Sequence) -> None:
        self._queues.setdefault(self._tenant(sequence), _Queue()).push(self._rank(sequence), sequence)

    def pop(self) -> Sequence | None:
        best: tuple[Key, str] | None = None
        for tenant, queue in self._queues.items():
            head = queue.head()
            if head is not None and (best is None or self.key(head) < best[0]):
                best = (self.key(head), tenant)
        return self._take(best[1]) if best else None

    def _take(self, tenant: str) -> Sequence | None:
        queue = self._queues[tenant]
        sequence = queue.pop()
        if not len(queue):
            del self._queues[tenant]
        return sequence

    def remove(self, sequence: Sequence) -> None:
        tenant = self._tenant(sequence)
        queue = self._queues.get(tenant)
        if queue is not None:
            queue.remove(sequence)
            if not len(queue):
                del self._queues[tenant]

    def charge(self, sequence: Sequence, prompt_tokens: int, output_tokens: int) -> None:
        tenant = self._tenant(sequence)
        cost = prompt_tokens * PROMPT_TOKEN_COST + output_tokens * OUTPUT_TOKEN_COST
        self._counters[tenant] = self._counters.get(tenant, 0.0) + cost / self._weights.get(
            tenant, self._default_weight
        )

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for queue in self._queues.values() for sequence in queue)


def make_policy(name: str, tenant_weights: Mapping[str, float] | None = None) -> Policy:
    """The policy called ``name``: ``fcfs``, ``priority``, ``deadline`` or ``fair``.

    Raises:
        ValueError: there is no such policy.
    """
    if name == "fair":
        return FairShare(tenant_weights)
    policies: dict[str, type[Policy]] = {
        "fcfs": FirstComeFirstServed,
        "priority": PriorityFirst,
        "deadline": EarliestDeadlineFirst,
    }
    if name not in policies:
        raise ValueError(f"policy: got {name!r}, allowed: {', '.join([*policies, 'fair'])}")
    return policies[name]()
