"""What happens to each sequence on its way through the batch, and how the engine looks at one moment.

For those who watch: the live page and the traces. Nothing is collected while nobody does. The engine thread writes, and
what it hands out is plain data: no token, no text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from carousel.engine.timeline import StepRecord


class What(StrEnum):
    """The kind of an event."""

    ARRIVED = "arrived"  # it waits from now on; tokens: of its prompt; left: most of its output; detail: its tenant
    ADMITTED = "admitted"  # it has a seat; tokens: found in the prefix cache; left: known tokens to compute
    CHUNK = "chunk"  # part of its prompt (or of what was lost) was computed; tokens: how many; left 0: it samples now
    FIRST_TOKEN = "first_token"  # its first token is there
    PREEMPTED = "preempted"  # it lost its seat and waits again; tokens: computed ones that are lost
    ENDED = "ended"  # tokens: of its output; detail: the finish reason; held: a static batch keeps its row


class Event(NamedTuple):
    """Times in seconds of the engine's clock (``time.monotonic``). ``since``: when a chunk's step began."""

    what: What
    at: float
    order: int
    request_id: str
    choice: int = 0
    tokens: int = 0
    left: int = 0
    since: float = 0.0
    detail: str = ""
    held: bool = False


class Watcher(Protocol):
    """Told of every event, on the engine thread: be quick, never raise."""

    def on_events(self, events: list[Event], step: StepRecord | None) -> None:
        """What happened since the last call; ``step``: the iteration that has just ended, if one has."""


class Reason(StrEnum):
    """Why a sequence waits. Quotas are no reason: they refuse at the door."""

    SLOTS = "slots"  # the batch has no seat left
    BLOCKS = "blocks"  # too few KV blocks are free
    BUDGET = "budget"  # the step's tokens or time went to others
    PREFIX = "prefix"  # another one is computing its prefix: it will share it
    POLICY = "policy"  # the policy puts another one first, and nobody overtakes that one
    GROUP = "group"  # static batching: the group must finish first
    NEXT = "next"  # it came a moment ago: the next step looks at it


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One sequence at one moment. ``max_tokens``: most output tokens. ``computed_tokens`` have their KV.

    ``block_ranges``: (first, count) of its KV blocks in the order of its tokens; empty where there were too many.
    """

    order: int
    request_id: str
    index: int
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    num_blocks: int
    num_preemptions: int
    arrival: float
    admitted_at: float | None
    first_token_at: float | None
    decoding: bool
    reason: Reason | None = None
    block_ranges: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class PoolView:
    """The KV pool. ``cells``: one letter for each ``blocks_per_cell`` blocks from block 0 on, by the weightiest of its
    blocks: ``s`` shared by several sequences, ``u`` used by one, ``c`` cached for later prompts, ``.`` free. What lies
    behind the last cell was never used. The counts are exact."""

    num_blocks: int
    num_free: int
    num_cached: int
    num_shared: int
    blocks_per_cell: int
    cells: str

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached


@dataclass(frozen=True, slots=True)
class Glance:
    """The engine between two steps, at ``at``. ``running`` and ``waiting`` (in the policy's order) may be cut short:
    the numbers say how many there are. ``idle``: orders of ended sequences whose rows a static batch keeps. ``cost_s``:
    what the look took of the engine thread's time."""

    at: float
    running: list[SequenceView]
    num_running: int
    waiting: list[SequenceView]
    num_waiting: int
    idle: list[int]
    pool: PoolView
    static: bool
    cost_s: float
