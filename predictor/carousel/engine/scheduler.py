"""Who runs in this iteration, and with how many tokens.

There is no prefill phase and no decode phase. A sequence has ``num_tokens`` known and ``num_computed_tokens`` computed
ones, and a step computes some of the difference (the view of vLLM's v1 scheduler; iteration-level scheduling is Orca,
Yu et al., OSDI 2022; prompt chunks beside decodes are Sarathi-Serve, Agrawal et al., OSDI 2024).

Rules, in the order in which :meth:`Scheduler.schedule` applies them:

1. Running sequences go first, best by policy first. A decode always gets its token; prompt chunks share what is left of
   the step's budget. When a decode needs a block and none is left, the *worst* running sequence is preempted, so a
   sequence is never thrown out for one that is itself next to go.
2. Then waiting sequences, strictly in policy order: nobody overtakes a head that only lacks memory, or it would starve.
   Admission takes the blocks of all known tokens at once and leaves one more for every running sequence; so whoever is
   (re)admitted computes its prompt and some tokens before a new preemption can happen, and preemption cannot thrash.
3. A sequence whose next prompt block is being computed by a running one steps aside until it can share it.

The host may be a step ahead of the device: a schedule is made while the step before is in flight and its tokens are not
known. Steps run in the order of their launch, so what a launched step computes counts as computed, and each sequence is
taken to go on. Where that turns out wrong its row has run for nothing. Two things wait for the device: blocks come free
only when no step in flight may write them, and nobody is preempted while one is (``Schedule.unsettled``).

With ``static`` limits the same scheduler is the baseline it is measured against: a group is admitted only when the last
one has wholly finished, and the batch is a rectangle until then, as the padded batches of ``generate`` are: its prompts
are padded to the longest, and rows whose sequences have ended go on computing (Orca's "inactive requests").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from carousel.engine.block_pool import BlockPool, blocks_for, extend_hashes
from carousel.engine.cost_model import StepCostModel, attended
from carousel.engine.events import Reason
from carousel.engine.policy import Policy
from carousel.engine.request import Sequence, SequenceStatus
from carousel_kernels.layout import BLOCK_SIZE

MAX_ASIDE = 64
"""Waiting sequences that one step looks past because their prefix is about to be there: bounds the step's cost."""

ROW_GRAIN = 16
"""Steps with prompts have a multiple of this many tokens where they can: matrix libraries prepare a kernel for each
number of rows (oneDNN takes 0.4 ms for one), and tensor cores work on tiles of 16."""

MAX_STRETCH = 1.4
"""By what factor prompts may stretch a step beyond what its decodes take alone, whatever the latency target: streams
feel it little, and prompts would otherwise crawl. While fewer sequences wait for their first token than are streaming,
long prompts get no more than that, with ``protect_streams``: what a longer chunk saves the few costs every one of the
many. Long are those that, on average, do not fit a single step: shorter ones are over at once, and would only wait."""

MIN_CHUNK = 8
"""Prompt tokens that a step computes even when the decodes alone use up its time: prompts always get on."""


@dataclass(slots=True)
class ScheduledSequence:
    """A sequence in a step: its tokens ``[start, start + num_new_tokens)`` are computed now.

    ``idle``: computed only because a static batch is a rectangle: the row of a sequence that has ended, or the columns
    behind a prompt that is shorter than the longest one. ``samples``: the last token is among them, so that a next one
    comes out of this step. ``pending``: the id of that last token is not known to the host.
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    idle: bool = False
    samples: bool = field(init=False)
    pending: bool = field(init=False)

    def __post_init__(self) -> None:
        # Facts of the moment of scheduling: the sequence moves on.
        self.samples = not self.idle and self.end == self.sequence.num_tokens
        self.pending = not self.idle and self.end > len(self.sequence.token_ids)

    @property
    def end(self) -> int:
        return self.start + self.num_new_tokens

    @property
    def token_ids(self) -> list[int]:
        """The tokens to compute; padding is token 0, and so is a pending token's place."""
        known = self.sequence.token_ids[self.start : self.end]
        return known if len(known) == self.num_new_tokens else known + [0] * (self.num_new_tokens - len(known))


@dataclass(slots=True)
class Schedule:
    """One step. Entries with exactly one new token come first. ``admitted`` and ``preempted`` changed state in it.

    ``obstacle``: what the first of those that go on waiting lacks. ``num_left_tokens``: prompt tokens of sequences in
    the batch that the step had no room for. ``unsettled``: somebody went without who needs a preemption, and will get
    it once no step is in flight.
    """

    entries: list[ScheduledSequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    num_idle_tokens: int = 0
    num_attended: int = 0
    unsettled: bool = False
    obstacle: Reason | None = None
    num_left_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_decode_tokens + self.num_idle_tokens


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step. ``target_step_s`` 0 switches the latency target off. ``static`` admits whole groups only.
    ``protect_streams``: see ``MAX_STRETCH``."""

    max_batch_tokens: int
    max_batch_sequences: int
    target_step_s: float = 0.0
    prefix_caching: bool = True
    static: bool = False
    protect_streams: bool = True


class Scheduler:
    """Moves sequences between waiting, running and finished. Not thread-safe: the engine thread owns it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        policy: Policy,
        cost_model: StepCostModel | None = None,
        on_blocks_lost: Callable[[Sequence], None] | None = None,
    ) -> None:
        """``on_blocks_lost`` is told of every sequence whose block table was given back (preempted or finished)."""
        self.limits = limits
        self.pool = pool
        self.policy = policy
        self.cost_model = cost_model or StepCostModel()
        self.running: list[Sequence] = []
        self.idle: list[Sequence] = []  # ended, but still part of a static batch
        self.leaving: list[Sequence] = []  # ended, but a step in flight may still write their blocks
        self._num_in_flight = 0
        self._width = 0  # the longest prompt of a static batch, to which the others are padded
        self._padding: dict[int, int] = {}  # sequence.order -> columns of padding that are not computed yet
        self.cache_queries = 0
        self.cache_hits = 0
        self._obstacle: Reason | None = None  # what stopped the last step from admitting the first in the queue
        self._sharing: set[int] = set()  # orders of those that stepped aside for a prefix
        self._on_blocks_lost = on_blocks_lost or (lambda sequence: None)

    # ---- entering and leaving

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits from now on."""
        self.policy.arrive(sequence)
        self.policy.push(sequence)

    def remove(self, sequence: Sequence, *, abandoned: bool = False) -> None:
        """A sequence has ended, wherever it stood. Its seat is free at once, and its blocks once no step in flight may
        write them.

        Only in a static batch, unless it was ``abandoned``, do they stay until the group has wholly finished.
        """
        if sequence.status is SequenceStatus.FINISHED:
            return
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            if self.limits.static and not abandoned:
                self.idle.append(sequence)
            else:
                self._release(sequence)
        else:
            self.policy.remove(sequence)
        sequence.status = SequenceStatus.FINISHED
        self.policy.leave(sequence)
        if not self.running:
            while self.idle:
                self._release(self.idle.pop())

    def _release(self, sequence: Sequence) -> None:
        if sequence.num_in_flight:
            self.leaving.append(sequence)
            return
        self.pool.release(sequence.block_table)
        sequence.block_table.clear()
        self._padding.pop(sequence.order, None)
        self._on_blocks_lost(sequence)

    @property
    def num_waiting(self) -> int:
        return len(self.policy)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.policy) > 0

    def live(self) -> Iterator[Sequence]:
        """Every sequence that is running or waiting."""
        yield from self.running
        yield from self.policy

    def set_static(self, static: bool) -> None:
        """Change how the batch is filled, between two steps.

        To static: nobody joins those that run now, and when they have finished the first group forms. To continuous:
        the rows of a group that only computed for its shape come free at once.
        """
        self.limits = replace(self.limits, static=static)
        if not static:
            while self.idle:
                self._release(self.idle.pop())
            self._padding.clear()

    def reasons(self, waiting: Iterable[Sequence]) -> list[Reason]:
        """Why each of ``waiting``, the first of the queue in their order, was not admitted by the last step."""
        found: list[Reason] = []
        obstacle = self._obstacle
        for sequence in waiting:
            if sequence.order in self._sharing:
                found.append(Reason.PREFIX)
                continue
            found.append(obstacle or Reason.NEXT)
            if obstacle is Reason.BLOCKS:
                obstacle = Reason.POLICY  # they may lack nothing, but nobody overtakes
        return found

    # ---- one step

    def schedule(self) -> Schedule:
        """Choose the next step, giving its sequences the blocks they need.

        Never empty while anything is live, unless steps are in flight: then all may depend on what comes out of them.
        """
        step = Schedule()
        self.running.sort(key=self.policy.key)
        budget = self._schedule_running(step)
        self._sharing.clear()
        self._obstacle = Reason.BLOCKS
        if not step.preempted and not step.unsettled:
            self._obstacle = self._schedule_waiting(step, budget)
        step.entries.sort(key=lambda entry: entry.num_new_tokens != 1)
        step.obstacle = self._obstacle if len(self.policy) else None
        wanted = sum(sequence.num_uncomputed_tokens for sequence in self.running if not sequence.ending)
        step.num_left_tokens = max(0, wanted - step.num_prefill_tokens - step.num_decode_tokens)
        return step

    def _schedule_running(self, step: Schedule) -> int:
        """Rule 1. Returns the prompt tokens that are left of the budget."""
        for sequence in [s for s in self.running if s.num_uncomputed_tokens == 1 and s.order not in self._padding]:
            if sequence.status is SequenceStatus.RUNNING and not sequence.ending and self._grow(sequence, step):
                self._enter(step, sequence, 1)
        for sequence in self.idle:
            step.entries.append(ScheduledSequence(sequence, sequence.num_computed_tokens - 1, 1, idle=True))
            step.num_idle_tokens += 1
            step.num_attended += sequence.num_computed_tokens
        budget = self._prefill_budget(step)
        for sequence in self.running:
            if (sequence.num_uncomputed_tokens > 1 or sequence.order in self._padding) and budget > 0:
                budget = self._prefill(step, sequence, budget)
        return budget

    def _grow(self, sequence: Sequence, step: Schedule) -> bool:
        """Give a decode the block that its next token needs, preempting from the worst end. False: it went itself, or
        must wait until somebody can be preempted."""
        needed = blocks_for(sequence.num_tokens) - len(sequence.block_table)
        while needed > 0:
            blocks = self.pool.allocate(needed)
            if blocks is not None:
                sequence.block_table += blocks
                break
            if self._num_in_flight:
                step.unsettled = True
                return False
            if self.idle:
                self._release(self.idle.pop())  # memory for the living before the shape of the batch
                continue
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence, step: Schedule) -> None:
        """Throw a running sequence back to its place in the queue; what it had computed will be recomputed."""
        self.running.remove(victim)
        self._release(victim)
        victim.num_lost_tokens = max(victim.num_lost_tokens, victim.num_computed_tokens)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.status = SequenceStatus.WAITING
        step.preempted.append(victim)
        self.policy.push(victim)

    def _prefill_budget(self, step: Schedule) -> int:
        """Prompt tokens that fit beside the decodes already in ``step``, by count and by predicted time."""
        limits = self.limits
        budget = limits.max_batch_tokens - step.num_decode_tokens - step.num_idle_tokens
        if limits.target_step_s and step.num_decode_tokens:
            # The chunk most likely to run is the best running one's; its context makes the estimate.
            context = next((s.num_computed_tokens for s in self.running if s.num_uncomputed_tokens > 1), 0)
            decodes_s = self.cost_model.predict(step.num_tokens, step.num_attended)
            num_prompts = len(self.running) - step.num_decode_tokens + len(self.policy)
            stretched_s = MAX_STRETCH * decodes_s
            few = num_prompts < step.num_decode_tokens
            protect = limits.protect_streams and few and self._prompts_are_long(num_prompts)
            target_s = stretched_s if protect else max(limits.target_step_s, stretched_s)
            fits = self.cost_model.max_chunk(target_s, step.num_tokens, step.num_attended, context, budget)
            budget = min(budget, max(fits, MIN_CHUNK))
        if budget >= 2 * ROW_GRAIN:
            budget -= (step.num_tokens + budget) % ROW_GRAIN
        return budget

    def _prompts_are_long(self, num_prompts: int) -> bool:
        """Whether the prompts that are not computed yet, so many, are longer on average than a step may be.

        They count whole, however much of them is done: a long prompt would stretch the steps of its end.
        """
        running = sum(s.num_tokens - s.num_cached_tokens for s in self.running if s.num_uncomputed_tokens > 1)
        return running + sum(s.num_tokens for s in self.policy) > num_prompts * self.limits.max_batch_tokens

    def _prefill(self, step: Schedule, sequence: Sequence, budget: int) -> int:
        """Compute some of the sequence's prompt, its padding first; returns what is left of the budget."""
        padding = self._padding.pop(sequence.order, 0)
        if padding:
            count = min(padding, budget)
            step.entries.append(ScheduledSequence(sequence, self._width - padding, count, idle=True))
            step.num_idle_tokens += count
            step.num_attended += attended(count, self._width - padding)
            budget -= count
            if count < padding:
                self._padding[sequence.order] = padding - count
        return budget - self._enter(step, sequence, min(sequence.num_uncomputed_tokens, budget)) if budget else 0

    def _enter(self, step: Schedule, sequence: Sequence, count: int) -> int:
        start = sequence.num_computed_tokens
        step.entries.append(ScheduledSequence(sequence, start, count))
        if sequence.num_uncomputed_tokens == 1:
            step.num_decode_tokens += count
        else:
            step.num_prefill_tokens += count
        step.num_attended += attended(count, start)
        step.num_recomputed_tokens += max(0, min(start + count, sequence.num_lost_tokens) - start)
        return count

    # ---- admission to the batch

    def _schedule_waiting(self, step: Schedule, budget: int) -> Reason | None:
        """Rules 2 and 3. Returns what the first of those that go on waiting lacks, if it was that far."""
        static = self.limits.static
        obstacle: Reason | None = None
        if static and self.running:
            return Reason.GROUP
        aside: list[Sequence] = []
        coming = self._coming_hashes() if len(self.policy) else set()
        # A static group is closed with its first step: whoever fits joins now, and only then is its width known.
        while (budget > 0 or static) and len(aside) < MAX_ASIDE and (sequence := self.policy.pop()) is not None:
            if coming and not static and self._prefix_is_coming(sequence, coming):
                aside.append(sequence)
                self._sharing.add(sequence.order)
                continue
            if not self._admit(sequence, step):
                aside.append(sequence)
                obstacle = Reason.SLOTS if len(self.running) >= self.limits.max_batch_sequences else Reason.BLOCKS
                break
            if not static:
                coming.update(sequence.block_hashes[sequence.num_computed_tokens // BLOCK_SIZE :])
                budget = self._prefill(step, sequence, budget)
        for sequence in aside:
            self.policy.push(sequence)
        if static:
            self._start_group(step, budget)
        return obstacle or (Reason.BUDGET if budget <= 0 else None)

    def _start_group(self, step: Schedule, budget: int) -> None:
        """Pad the prompts of a new static group to its longest and begin them.

        The padding stands behind the prompt, where the decodes will overwrite it; nothing ever attends to it. A row for
        whose padding there is no memory goes without.
        """
        self._width = max((sequence.num_tokens for sequence in self.running), default=0)
        for sequence in self.running:
            missing = blocks_for(self._width) - len(sequence.block_table)
            if self._width > sequence.num_tokens and missing + len(self.running) <= self.pool.num_available:
                sequence.block_table += self.pool.allocate(missing) or []
                self._padding[sequence.order] = self._width - sequence.num_tokens
        for sequence in self.running:
            if budget > 0:
                budget = self._prefill(step, sequence, budget)

    def _coming_hashes(self) -> set[bytes]:
        """Names of the prompt blocks that running sequences have yet to compute."""
        if not self.limits.prefix_caching:
            return set()
        return {
            name
            for sequence in self.running
            if sequence.num_uncomputed_tokens > 1
            for name in sequence.block_hashes[sequence.num_computed_tokens // BLOCK_SIZE :]
        }

    def _prefix_is_coming(self, sequence: Sequence, coming: set[bytes]) -> bool:
        if self._must_compute_all(sequence):
            return False
        extend_hashes(sequence.block_hashes, sequence.token_ids, sequence.request.cache_salt)
        known = len(self.pool.find(sequence.block_hashes))
        return known < self._shareable_blocks(sequence) and sequence.block_hashes[known] in coming

    @staticmethod
    def _must_compute_all(sequence: Sequence) -> bool:
        """Whether logits of prompt tokens are still owed, which a cached prefix cannot give."""
        wanted = sequence.request.sampling.prompt_logprobs is not None
        return wanted and len(sequence.prompt_logprobs or ()) < sequence.num_prompt_tokens

    @staticmethod
    def _shareable_blocks(sequence: Sequence) -> int:
        # At least one token must be computed, or there would be no logits to sample from.
        return (sequence.num_tokens - 1) // BLOCK_SIZE

    def _admit(self, sequence: Sequence, step: Schedule) -> bool:
        """Give a waiting sequence its cached prefix and the blocks of all its known tokens, or leave all as it was."""
        cached: list[int] = []
        if self.limits.prefix_caching:
            extend_hashes(sequence.block_hashes, sequence.token_ids, sequence.request.cache_salt)
            if not self._must_compute_all(sequence):
                cached = self.pool.find(sequence.block_hashes[: self._shareable_blocks(sequence)])
        total = blocks_for(sequence.num_tokens)
        victims = self._victims(sequence, total - len(cached) + self.pool.num_revived(cached))
        if victims and self._num_in_flight:
            step.unsettled = True
            return False
        if victims is None:
            return False
        self.pool.share(cached)  # before the victims' blocks come free: they may be the same
        for victim in victims:
            self._preempt_scheduled(victim, step)
        fresh = self.pool.allocate(total - len(cached))
        if fresh is None:
            raise AssertionError("admission counted blocks that are not there")
        sequence.block_table += cached + fresh
        sequence.num_computed_tokens = len(cached) * BLOCK_SIZE
        if not sequence.num_preemptions:
            sequence.num_cached_tokens = sequence.num_computed_tokens
            self.cache_queries += sequence.num_tokens if self.limits.prefix_caching else 0
            self.cache_hits += sequence.num_cached_tokens
        sequence.status = SequenceStatus.RUNNING
        self.running.append(sequence)
        step.admitted.append(sequence)
        return True

    def _victims(self, sequence: Sequence, needed: int) -> list[Sequence] | None:
        """Whom to preempt so that ``sequence`` gets ``needed`` blocks and a seat; None if even that is not enough.

        Usually the empty list: only a policy with :meth:`Policy.may_preempt` throws anybody out.
        """
        remaining, available = len(self.running), self.pool.num_available
        if self._has_room(remaining, available, needed):
            return []
        victims: list[Sequence] = []
        for victim in sorted(self.running, key=self.policy.key, reverse=True):
            if not self.policy.may_preempt(sequence, victim):
                return None
            victims.append(victim)
            # Counts only what surely comes free: a block shared with somebody else stays.
            available += self.pool.num_exclusive(victim.block_table)
            remaining -= 1
            if self._has_room(remaining, available, needed):
                return victims
        return None

    def _has_room(self, num_running: int, available: int, needed: int) -> bool:
        # One block more for each running sequence and for the new one (see the module's rule 2). Alone in the batch it
        # needs no reserve: what can never fit was refused at the door.
        reserve = num_running + 1 if num_running else 0
        return num_running < self.limits.max_batch_sequences and available >= needed + reserve

    def _preempt_scheduled(self, victim: Sequence, step: Schedule) -> None:
        """Preempt a sequence that may already have a place in this step: take it out again."""
        for entry in step.entries:
            if entry.sequence is victim:
                if victim.num_uncomputed_tokens == 1:
                    step.num_decode_tokens -= entry.num_new_tokens
                else:
                    step.num_prefill_tokens -= entry.num_new_tokens
                step.num_attended -= attended(entry.num_new_tokens, entry.start)
                step.num_recomputed_tokens -= max(0, min(entry.end, victim.num_lost_tokens) - entry.start)
                step.entries.remove(entry)
                break
        self._preempt(victim, step)

    # ---- after the schedule

    def launched(self, step: Schedule) -> None:
        """The step is on its way, and whatever is launched from now on runs after it.

        So its tokens count as computed, the ones it samples as there, and blocks that became full can be found.
        """
        self._num_in_flight += 1
        for entry in step.entries:
            sequence = entry.sequence
            sequence.num_in_flight += 1
            if not entry.idle:
                sequence.num_computed_tokens = entry.end
                sequence.num_pending_tokens += entry.samples
                self._name_full_blocks(sequence, entry.start, entry.end)

    def collected(self, step: Schedule) -> None:
        """The step, the oldest in flight, has run. Whatever ids it sampled are about to be known."""
        self._num_in_flight -= 1
        for entry in step.entries:
            sequence = entry.sequence
            sequence.num_in_flight -= 1
            sequence.num_pending_tokens -= entry.samples
            if sequence.status is SequenceStatus.RUNNING and not entry.idle:
                # What is computed again after a preemption is the engine's fault and not charged.
                first_new = max(entry.start, sequence.num_lost_tokens)
                prompt_tokens = max(0, min(entry.end, sequence.num_prompt_tokens) - first_new)
                self.policy.charge(sequence, prompt_tokens, 1 if entry.samples else 0)
            elif not sequence.num_in_flight and sequence in self.leaving:
                self.leaving.remove(sequence)
                self._release(sequence)

    def known(self, sequence: Sequence) -> None:
        """The id of one more token of a running sequence has become known. A step in flight may have computed it."""
        last = len(sequence.token_ids)
        self._name_full_blocks(sequence, last - 1, min(last, sequence.num_computed_tokens))

    def _name_full_blocks(self, sequence: Sequence, start: int, end: int) -> None:
        """Let others find the blocks that become full with the tokens ``[start, end)``, as far as these are known."""
        first, last = start // BLOCK_SIZE, min(end, len(sequence.token_ids)) // BLOCK_SIZE
        if last > first and self.limits.prefix_caching:
            extend_hashes(sequence.block_hashes, sequence.token_ids, sequence.request.cache_salt)
            for i in range(first, last):
                self.pool.name(sequence.block_table[i], sequence.block_hashes[i])
