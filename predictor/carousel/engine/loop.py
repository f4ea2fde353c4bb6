"""One iteration of the engine: schedule, run, sample, publish. What the engine thread does, without the thread.

Order of side effects in :meth:`EngineCore.step`: ended requests leave and free their blocks; the scheduler gives out
seats and blocks; the step is launched; blocks that become full get their names. Then, of the oldest step in flight:
tokens are appended, and sequences that end with them leave; deltas are published; the timeline is told. Nothing else
touches this state, so nothing is locked.

With ``depth`` 0 a step is collected right after its launch. With ``depth`` 1 the host is a step ahead of the device:
while one step runs, the host handles the tokens of the one before, and schedules and launches the one after, whose
decodes take tokens that the host has not seen. The tokens are the same: a row whose sequence turns out to have ended
is discarded, and nothing that it wrote is ever read.
"""

from __future__ import annotations

import heapq
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from carousel.engine.device import Readback
from carousel.engine.events import Event, Glance, What
from carousel.engine.glance import look
from carousel.engine.ledger import Account, Counters, Ledger
from carousel.engine.meter import Meter, StepShares, Work
from carousel.engine.request import (
    FinishReason,
    GenerationRequest,
    Output,
    RequestTimings,
    Sequence,
    SequenceStatus,
    TokenLogprob,
)
from carousel.engine.runner import PromptLogits, Runner
from carousel.engine.sampler import Draw, PromptDraw, SampledToken, SamplerLike
from carousel.engine.scheduler import Schedule, Scheduler
from carousel.engine.timeline import RequestRecord, Seat, SeatUse, StepRecord, Timeline

log = logging.getLogger(__name__)

_ABNORMAL = (FinishReason.ERROR, FinishReason.TIMEOUT, FinishReason.CANCELLED)


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request between admission and its last delta. ``deliver`` hands deltas to the client's side."""

    request: GenerationRequest
    account: Account
    sequences: list[Sequence]
    expires_at: float | None = None
    unfinished: int = 0
    reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.unfinished = len(self.sequences)


@dataclass(slots=True)
class _InFlight:
    """A step that was launched and whose tokens the host has not taken yet. Times on the core's clock."""

    schedule: Schedule
    sampled: list[Sequence]
    draw: Draw | None
    done: Readback | None
    prompts: list[tuple[Sequence, PromptDraw]]
    shares: StepShares
    started: float
    scheduled: float
    launched: float


@dataclass(slots=True)
class _Step:
    """What a step collects for publishing and for its record."""

    num_sampled_tokens: int = 0
    num_discarded_tokens: int = 0
    deltas: list[tuple[LiveRequest, Output]] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)


class EngineCore:
    """The state of the engine thread, and its one verb, :meth:`step`.

    Args:
        publish: takes all deltas of a step at once; must not block.
        depth: how many steps the host may be ahead of the device, 0 or 1.
        work: what a token and a query-key pair cost, by which the device's time is divided.
        clock: seconds, monotonic; requests' ``arrival`` is of the same clock.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        sampler: SamplerLike,
        ledger: Ledger,
        timeline: Timeline,
        publish: Callable[[list[tuple[LiveRequest, Output]]], None],
        clock: Callable[[], float] = time.monotonic,
        depth: int = 0,
        work: Work | None = None,
    ) -> None:
        if depth not in (0, 1):
            raise ValueError(f"depth: got {depth!r}, allowed: 0 or 1")
        self.scheduler = scheduler
        self.timeline = timeline
        self.meter = Meter(work or Work(), timeline.record_usage)
        self._runner = runner
        self._sampler = sampler
        self._ledger = ledger
        self._publish = publish
        self._clock = clock
        self._depth = depth
        self._in_flight: deque[_InFlight] = deque()  # the oldest first
        self._last_done = -math.inf
        self._live: dict[str, LiveRequest] = {}
        self._owner: dict[int, LiveRequest] = {}  # sequence.order -> its request
        self._deadlines: list[tuple[float, int, LiveRequest]] = []
        self._past_deadlines = 0  # how many of them, at most, belong to requests that have ended
        self._tiebreak = count()
        self._counters = Counters()
        self._events: list[Event] = []  # what watchers have not been told yet

    # ---- requests come and go

    def add(self, live: LiveRequest) -> None:
        """An admitted request joins the waiting queue."""
        self._live[live.request.request_id] = live
        if live.expires_at is not None:
            heapq.heappush(self._deadlines, (live.expires_at, next(self._tiebreak), live))
        for sequence in live.sequences:
            self._owner[sequence.order] = live
            prompt, tenant = sequence.num_prompt_tokens, live.request.tenant
            most = sequence.max_total_tokens - prompt
            self._note(What.ARRIVED, sequence, live.request.arrival, tokens=prompt, left=most, detail=tenant)
            if live.request.sampling.prompt_logprobs is not None:
                # Nothing predicts the first token.
                sequence.prompt_logprobs = [TokenLogprob(sequence.token_ids[0], None, 0, [])]
            self.scheduler.add(sequence)

    def end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """End a request wherever it stands; its blocks are free once no step in flight may write them. Unknown ids have
        ended already."""
        live = self._live.get(request_id)
        if live is not None:
            self._end(live, reason, error)

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End everything that is live."""
        for live in list(self._live.values()):
            self._end(live, reason, error)

    def _end(self, live: LiveRequest, reason: FinishReason, error: str | None) -> None:
        step = _Step()
        for sequence in live.sequences:
            if not sequence.finished:
                output = self._output(live, sequence)
                output.text = sequence.detokenizer.flush()
                output.error = error
                self._finish(step, live, sequence, output, reason)
        self.meter.settle()
        self._report()
        self._tell(None)
        self._publish(step.deltas)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    @property
    def next_deadline(self) -> float | None:
        """When the next request times out, on the core's clock."""
        while self._deadlines and self._deadlines[0][2].unfinished == 0:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _drop_deadline(self) -> None:
        """A request ended before its deadline. It must not be kept, prompt and all, until that has passed."""
        self._past_deadlines += 1
        if 2 * self._past_deadlines > len(self._deadlines):
            self._deadlines = [entry for entry in self._deadlines if entry[2].unfinished]
            heapq.heapify(self._deadlines)
            self._past_deadlines = 0

    def expire(self) -> None:
        """End the requests whose time is up."""
        now = self._clock()
        while (due := self.next_deadline) is not None and due <= now:
            _, _, live = heapq.heappop(self._deadlines)
            self._end(live, FinishReason.TIMEOUT, None)

    def reset_counters(self) -> None:
        """Start counting anew (after a warm-up)."""
        self._counters = Counters()
        self.meter.reset()
        self.scheduler.cache_queries = self.scheduler.cache_hits = 0

    # ---- one iteration

    def step(self) -> bool:
        """Do one iteration. Returns whether there was anything to do."""
        self.expire()
        if not self.has_work:
            return False
        started = self._clock()
        schedule = self.scheduler.schedule()
        self._account_for(schedule)
        if schedule.entries:
            self._in_flight.append(self._launch(schedule, started))
        ahead = self._depth if schedule.entries and not schedule.unsettled else 0
        while len(self._in_flight) > ahead:
            self._collect(self._in_flight.popleft())
        return True

    def _launch(self, schedule: Schedule, started: float) -> _InFlight:
        """Start a step on the device: its forward pass, its sampling, and the tokens' way to the step after it."""
        scheduled = self._clock()
        scheduler = self.scheduler
        shares = self.meter.launched(schedule, scheduler.running, scheduler.leaving, scheduler.pool)
        result = self._runner.run(schedule)
        launched = self._clock()
        prompts = [(prompt.entry.sequence, self._draw_prompt(prompt)) for prompt in result.prompts]
        draw = None
        if result.sampled:
            draw = self._sampler.launch(result.logits, result.sampled, result.last_tokens)
            if self._depth:
                self._runner.feed(result.sampled, draw.tokens)
        self.scheduler.launched(schedule)
        return _InFlight(schedule, result.sampled, draw, result.done, prompts, shares, started, scheduled, launched)

    def _collect(self, flight: _InFlight) -> None:
        """Wait for a step and hand out what it brought."""
        if flight.done is not None:
            flight.done.wait()
        tokens = flight.draw.wait() if flight.draw is not None else []
        now = self._clock()
        self.scheduler.collected(flight.schedule)
        step = _Step()
        if self.timeline.watchers:
            self._note_chunks(flight, now)
        for sequence, prompt in flight.prompts:
            if not sequence.finished and sequence.prompt_logprobs is not None:
                sequence.prompt_logprobs += prompt.wait()
        for sequence, token in zip(flight.sampled, tokens, strict=True):
            if sequence.finished:
                step.num_discarded_tokens += 1
            else:
                step.num_sampled_tokens += 1
                self._accept(step, sequence, token, now)
        # What the device had done by its own step's end is all that a synchronous forward pass is measured by.
        self._record(step, flight, now if self._depth else flight.launched)
        self._publish(step.deltas)

    def _account_for(self, schedule: Schedule) -> None:
        now = self._clock()
        for sequence in schedule.preempted:
            self._ledger.stopped(self._owner[sequence.order].account, ended=False)
            self._note(What.PREEMPTED, sequence, now, tokens=sequence.num_lost_tokens)
        for sequence in schedule.admitted:
            self._ledger.started(self._owner[sequence.order].account)
            cached = sequence.num_computed_tokens
            self._note(What.ADMITTED, sequence, now, tokens=cached, left=sequence.num_tokens - cached)
        for entry in schedule.entries:
            sequence = entry.sequence
            if sequence.admitted_at is None:
                sequence.admitted_at = now
                # The choices of a request share its prompt: it counts once.
                self._counters.prompt_tokens += 0 if sequence.index else sequence.num_prompt_tokens

    def _draw_prompt(self, prompt: PromptLogits) -> PromptDraw:
        sequence, entry = prompt.entry.sequence, prompt.entry
        # Row i predicts token start + i + 1; rows computed again after a preemption are known already.
        first = max(len(sequence.prompt_logprobs or ()), entry.start + 1)
        last = max(first, min(entry.end + 1, sequence.num_prompt_tokens))
        rows = prompt.logits[first - entry.start - 1 : last - entry.start - 1]
        wanted = sequence.request.sampling.prompt_logprobs or 0
        return self._sampler.launch_prompt(rows, sequence.token_ids[first:last], wanted)

    # ---- tokens become deltas

    def _output(self, live: LiveRequest, sequence: Sequence) -> Output:
        return Output(
            live.request.request_id,
            sequence.index,
            prompt_tokens=sequence.num_prompt_tokens,
            cached_tokens=sequence.num_cached_tokens,
            completion_tokens=sequence.num_output_tokens,
        )

    def _accept(self, step: _Step, sequence: Sequence, token: SampledToken, now: float) -> None:
        """Append a sampled token and publish what it brought; end the sequence if it ends with it."""
        live = self._owner[sequence.order]
        if token.token_id < 0:
            output = self._output(live, sequence)
            output.text, output.error = sequence.detokenizer.flush(), "the model's logits are not finite"
            self._finish(step, live, sequence, output, FinishReason.ERROR)
            return
        sequence.token_ids.append(token.token_id)
        sequence.sampler.update(token.token_id)
        if sequence.last_token_at is not None:
            step.latencies_s.append(now - sequence.last_token_at)
        else:
            sequence.first_token_at = now
            self._note(What.FIRST_TOKEN, sequence, now)
        sequence.last_token_at = now
        self._counters.generation_tokens += 1

        output = self._output(live, sequence)
        output.token_ids.append(token.token_id)
        if token.logprob is not None:
            output.logprobs = [token.logprob]
        if sequence.num_output_tokens == 1:
            output.prompt_logprobs = sequence.prompt_logprobs
        reason = self._advance(sequence, token.token_id, output)
        if reason is not None:
            self._finish(step, live, sequence, output, reason)
        else:
            self.scheduler.known(sequence)
            step.deltas.append((live, output))

    @staticmethod
    def _advance(sequence: Sequence, token_id: int, output: Output) -> FinishReason | None:
        """Turn the new token into text, and say whether it is the sequence's last and why."""
        params = sequence.request.sampling
        enough = sequence.num_output_tokens >= params.min_tokens
        if enough and token_id in params.stop_token_ids:
            output.stop_reason = token_id
            if params.include_stop:
                sequence.detokenizer.append(token_id)
            output.text = sequence.detokenizer.flush()
            return FinishReason.STOP
        if enough and not params.ignore_eos and token_id in sequence.eos_ids:
            output.text = sequence.detokenizer.flush()
            return FinishReason.EOS
        stop = sequence.detokenizer.append(token_id)
        if stop is not None:
            output.stop_reason = stop
            output.text = sequence.detokenizer.take()
            return FinishReason.STOP
        if len(sequence.token_ids) >= sequence.max_total_tokens:
            output.text = sequence.detokenizer.flush()
            return FinishReason.LENGTH
        output.text = sequence.detokenizer.take()
        return None

    def _finish(self, step: _Step, live: LiveRequest, sequence: Sequence, output: Output, reason: FinishReason) -> None:
        """A sequence ends: seat and blocks are free, the client gets its last delta, the books are closed."""
        if sequence.status is SequenceStatus.RUNNING:
            self._ledger.stopped(live.account, ended=True)
        self.scheduler.remove(sequence, abandoned=reason in _ABNORMAL)
        del self._owner[sequence.order]
        arrival, now = live.request.arrival, self._clock()
        output.finish_reason = reason
        output.timings = RequestTimings(
            queue_s=(now if sequence.admitted_at is None else sequence.admitted_at) - arrival,
            first_token_s=(now if sequence.first_token_at is None else sequence.first_token_at) - arrival,
            total_s=now - arrival,
        )
        step.deltas.append((live, output))
        if self.timeline.watchers:
            held = sequence in self.scheduler.idle
            self._note(What.ENDED, sequence, now, tokens=sequence.num_output_tokens, detail=reason.value, held=held)
        if live.reason not in _ABNORMAL:
            live.reason = reason
        live.unfinished -= 1
        if live.unfinished == 0:
            del self._live[live.request.request_id]
            if live.expires_at is not None:
                self._drop_deadline()
            self._ledger.left(live.account, live.reason or reason)
            self.meter.ended(live, now)
            self.timeline.record_request(request_record(live, now))

    # ---- the record of it

    def _report(self) -> None:
        pool, counters = self.scheduler.pool, self._counters
        counters.prefix_cache_queries = self.scheduler.cache_queries
        counters.prefix_cache_hits = self.scheduler.cache_hits
        meter = self.meter
        counters.device_ns, counters.slot_ns, counters.block_ns = meter.device_ns, meter.slot_ns, meter.block_ns
        self._ledger.report(counters, pool.num_blocks, pool.num_free, pool.num_cached)

    def _record(self, step: _Step, flight: _InFlight, ran: float) -> None:
        """Close the books of a step. Its time begins where that of the step before ended: what the host did while that
        one ran cost nothing."""
        done, schedule = self._clock(), flight.schedule
        started, scheduled = max(flight.started, self._last_done), max(flight.scheduled, self._last_done)
        self._last_done = done
        counters = self._counters
        self.scheduler.cost_model.observe(schedule.num_tokens, schedule.num_attended, done - scheduled)
        counters.steps += 1
        counters.recomputed_tokens += schedule.num_recomputed_tokens
        counters.preemptions += len(schedule.preempted)
        self.meter.collected(flight.shares, max(0, round((done - started) * 1e9)))
        self.meter.settle()
        self._report()
        record = StepRecord(
            index=counters.steps,
            started=started,
            duration_s=done - started,
            schedule_s=scheduled - started,
            run_s=ran - scheduled,
            sample_s=done - ran,
            num_sequences=sum(not entry.idle for entry in schedule.entries),
            num_prefill_tokens=schedule.num_prefill_tokens,
            num_decode_tokens=schedule.num_decode_tokens,
            num_recomputed_tokens=schedule.num_recomputed_tokens,
            num_idle_tokens=schedule.num_idle_tokens,
            num_sampled_tokens=step.num_sampled_tokens,
            num_discarded_tokens=step.num_discarded_tokens,
            num_preemptions=len(schedule.preempted),
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting,
            kv_cache_usage=1 - self.scheduler.pool.num_available / max(self.scheduler.pool.num_blocks, 1),
            num_left_tokens=schedule.num_left_tokens,
            obstacle=schedule.obstacle or "",
            seats=tuple(_seats(schedule)) if self.timeline.record_seats else (),
        )
        self.timeline.record_step(record, step.latencies_s)
        self._tell(record)

    # ---- those who watch

    def _note(
        self,
        what: What,
        sequence: Sequence,
        at: float,
        *,
        tokens: int = 0,
        left: int = 0,
        since: float = 0.0,
        detail: str = "",
        held: bool = False,
    ) -> None:
        if self.timeline.watchers:
            request_id = sequence.request.request_id
            self._events.append(
                Event(what, at, sequence.order, request_id, sequence.index, tokens, left, since, detail, held)
            )

    def _note_chunks(self, flight: _InFlight, now: float) -> None:
        since = max(flight.started, self._last_done)
        for entry in flight.schedule.entries:
            sequence, count = entry.sequence, entry.num_new_tokens
            if not entry.idle and (count > 1 or entry.start < sequence.num_prompt_tokens):
                left = 0 if entry.samples else max(1, sequence.num_tokens - entry.end)
                self._note(What.CHUNK, sequence, now, tokens=count, left=left, since=since)

    def _tell(self, step: StepRecord | None) -> None:
        events, self._events = self._events, []
        if events or step is not None:
            self.timeline.tell(events, step)

    def glance(self) -> Glance:
        """How everything stands between two steps; watchers hear before of all that led to it."""
        self._tell(None)
        return look(self.scheduler, self._clock())


def _seats(schedule: Schedule) -> Iterator[Seat]:
    for entry in schedule.entries:
        sequence, use = entry.sequence, SeatUse.PREFILL
        if entry.idle:
            use = SeatUse.IDLE
        elif entry.num_new_tokens == 1 and entry.start >= sequence.num_prompt_tokens:
            use = SeatUse.DECODE
        yield Seat(sequence.request.request_id, sequence.index, use, entry.num_new_tokens)
    for sequence in schedule.preempted:
        yield Seat(sequence.request.request_id, sequence.index, SeatUse.LOST, 0)


def request_record(live: LiveRequest, now: float) -> RequestRecord:
    """The record of a request that has ended at ``now``."""
    request, sequences = live.request, live.sequences
    arrival = request.arrival
    admitted = min((s.admitted_at for s in sequences if s.admitted_at is not None), default=None)
    first = min((s.first_token_at for s in sequences if s.first_token_at is not None), default=None)
    last = max((s.last_token_at for s in sequences if s.last_token_at is not None), default=None)
    per_token = [
        (s.last_token_at - s.first_token_at) / (s.num_output_tokens - 1)
        for s in sequences
        if s.last_token_at is not None and s.first_token_at is not None and s.num_output_tokens > 1
    ]
    return RequestRecord(
        request_id=request.request_id,
        tenant=request.tenant,
        finish_reason=live.reason or FinishReason.ERROR,
        num_choices=len(sequences),
        prompt_tokens=sequences[0].num_prompt_tokens,
        cached_tokens=sequences[0].num_cached_tokens,
        output_tokens=sum(s.num_output_tokens for s in sequences),
        num_preemptions=sum(s.num_preemptions for s in sequences),
        e2e_s=now - arrival,
        queue_s=None if admitted is None else admitted - arrival,
        ttft_s=None if first is None else first - arrival,
        prefill_s=None if first is None or admitted is None else first - admitted,
        decode_s=None if first is None or last is None else last - first,
        tpot_s=sum(per_token) / len(per_token) if per_token else None,
        max_tokens=request.sampling.max_tokens,
    )
