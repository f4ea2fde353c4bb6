"""The run: lone answers, the saturated rate, the load, idle again, and SIGTERM in the middle of a last burst."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from . import analysis
from .calls import HttpClient
from .grpc_calls import GrpcClient
from .outcome import COMPLETE, UNEXPLAINED, Seen, classify
from .plan import BAD_SHARE, Known, Plan, Planner, changed, steady_length
from .server import HOST, Server, SoakError
from .watch import Sample, Watch

T = TypeVar("T")

#: A greedy token is comparable where it leads the runner-up by this many nats; below, rounding may decide.
STEADY_MARGIN = 0.05
_KNOWN_PROMPTS, _KNOWN_TOKENS, _SHORTEST_KNOWN = 8, 32, 4
_EVIDENCE = 20
_GRACE_MARGIN_S = 10.0
_SETTLE_S = 120.0


@dataclass(frozen=True, slots=True)
class Shape:
    """How long, how much and how often. Seconds and requests per second."""

    load_s: float
    saturate_s: float
    burst_s: float
    factor: float
    max_rate: float
    max_requests: int
    max_in_flight: int
    workers: int
    guard_s: float
    scrape_s: float
    drain_s: float
    seed: int


@dataclass
class Tally:
    """What became of the requests of the load and of the last burst."""

    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    total_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    first_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    evidence: list[str] = field(default_factory=list)
    checked: int = 0
    differing: int = 0
    departures: Counter[str] = field(default_factory=Counter)

    def add(self, plan: Plan, seen: Seen) -> str:
        outcome, why = classify(plan, seen)
        self.counts[plan.protocol][outcome] += 1
        if plan.expected is not None and seen.text:
            self.checked += 1
            self.differing += why.startswith("greedy text")
        if seen.left and plan.leave is not None:
            self.departures[f"{plan.leave.where}, {'RST' if plan.leave.reset else 'FIN'}"] += 1
        if outcome == COMPLETE:
            self.total_s[plan.protocol].append(seen.total_s)
            if seen.first_s is not None:
                self.first_s[plan.protocol].append(seen.first_s)
        elif outcome == UNEXPLAINED and len(self.evidence) < _EVIDENCE:
            kept = dataclasses.replace(seen, text=seen.text[:200])
            self.evidence.append(f"{plan.protocol}: {why}; max_tokens {plan.max_tokens}, leave {plan.leave}, {kept}")
        return outcome

    @property
    def totals(self) -> Counter[str]:
        return sum(self.counts.values(), Counter())


class Soak:
    """One run against one ready server."""

    def __init__(self, server: Server, model: str, shape: Shape, planner: Planner) -> None:
        self.server, self.shape, self.planner = server, shape, planner
        self.http = HttpClient((HOST, server.http_port), model, shape.guard_s)
        self.grpc = GrpcClient(f"{HOST}:{server.grpc_port}", model, shape.guard_s)
        self.watch = Watch(server.pid, server.url, shape.scrape_s)
        self.tally = Tally()
        self.stopping = False
        self.sent = self.sent_well = self.skipped = 0
        self._running: set[asyncio.Task[str]] = set()
        self._arrivals = random.Random(shape.seed)

    async def one(self, plan: Plan, tally: Tally) -> str:
        """Send one request, wait for its end, count it."""
        seen = Seen(stopping=self.stopping)
        started = time.perf_counter()
        if plan.protocol == "grpc":
            await self.grpc.call(plan, seen)
        elif plan.leave is not None:
            await self.http.leave(plan, seen)
        else:
            await self.http.call(plan, seen)
        seen.total_s = time.perf_counter() - started
        # What was on its way when the server went may have met a closed door.
        seen.stopping = seen.stopping or (self.stopping and seen.status in (None, 503) and plan.leave is None)
        return tally.add(plan, seen)

    # ---- phases

    async def learn(self) -> None:
        """Ask for the lone greedy answers that the load's are compared with, one at a time on the idle server.

        Raises:
            SoakError: the server does not answer well-formed requests.
        """
        protocols = {False: "completions", True: "chat"}
        for chat, number in itertools.product((False, True), range(_KNOWN_PROMPTS)):
            prompt = self.planner.prompt()
            length = _KNOWN_TOKENS
            if not chat:
                length = steady_length(await self._margins(prompt), STEADY_MARGIN)
            plan = Plan(protocols[chat], prompt, max(1, length), greedy=True)
            if chat:
                plan = changed(plan, max_tokens=max(1, steady_length(await self._chat_margins(prompt), STEADY_MARGIN)))
            if plan.max_tokens < _SHORTEST_KNOWN and number:
                continue
            seen = Seen()
            await self.http.call(plan, seen)
            if not seen.ended:
                raise SoakError(f"no lone answer from the idle server: {seen}")
            self.planner.known.append(Known(prompt, plan.max_tokens, seen.text, chat))

    async def _margins(self, prompt: str) -> list[float]:
        body = {"prompt": prompt, "max_tokens": _KNOWN_TOKENS, "temperature": 0, "logprobs": 2}
        async with self.http.session.post(self.http.url + "/v1/completions", json=body) as response:
            tops = (await response.json())["choices"][0]["logprobs"]["top_logprobs"]
        return [lead(list(top.values())) for top in tops]

    async def _chat_margins(self, prompt: str) -> list[float]:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "max_tokens": _KNOWN_TOKENS}
        body |= {"temperature": 0, "logprobs": True, "top_logprobs": 2}
        async with self.http.session.post(self.http.url + "/v1/chat/completions", json=body) as response:
            tokens = (await response.json())["choices"][0]["logprobs"]["content"]
        return [lead([top["logprob"] for top in token["top_logprobs"]]) for token in tokens]

    async def saturate(self) -> float:
        """The rate of well-formed requests that the server completes with always enough of them outstanding."""
        tally, ends = Tally(), []
        end = time.monotonic() + self.shape.saturate_s

        async def worker() -> None:
            while time.monotonic() < end:
                if await self.one(self.planner.well_formed(), tally) == COMPLETE:
                    ends.append(time.monotonic())

        started = time.monotonic()
        await asyncio.gather(*(worker() for _ in range(self.shape.workers)))
        if tally.evidence or not ends:
            raise SoakError(f"the server cannot be saturated: {tally.evidence[:3]}")
        return len(ends) / (time.monotonic() - started)

    async def offer(self, rate: float, seconds: float) -> None:
        """Send well-formed requests at ``rate``, and bad ones on top, whatever becomes of them, within the bounds."""
        rate /= 1 - BAD_SHARE
        due = time.monotonic()
        end = due + seconds
        while due < end and self.sent < self.shape.max_requests:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            due += self._arrivals.expovariate(rate)
            if len(self._running) >= self.shape.max_in_flight:
                self.skipped += 1
                continue
            plan = self.planner.any()
            self.sent += 1
            self.sent_well += plan.bad is None
            task = asyncio.create_task(self.one(plan, self.tally))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def settle(self) -> Sample | None:
        """Wait for all answers, then for the server to be idle. None when it does not become so."""
        if self._running:
            await asyncio.gather(*self._running)
        await self.http.reconnect()
        async with aiohttp.ClientSession() as session:
            end = time.monotonic() + _SETTLE_S
            while time.monotonic() < end:
                sample = await self.watch.look(session)
                if sample is not None and sample.metrics and not sample.metrics["requests_live"]:
                    await asyncio.sleep(0.5)  # sockets of the last clients close
                    return await self.watch.look(session)
                await asyncio.sleep(0.2)
        return None

    async def stop_under_load(self, rate: float) -> tuple[int | None, float]:
        """A last burst with SIGTERM in its middle. Exit code and seconds from the signal to the exit."""
        burst = asyncio.create_task(self.offer(rate, self.shape.burst_s))
        await asyncio.sleep(self.shape.burst_s / 2)
        self.stopping = True
        self.watch.phase = "drain"
        self.server.terminate()
        started = time.monotonic()
        code = await self.server.wait(self.shape.drain_s + 2 * _GRACE_MARGIN_S)
        exit_s = time.monotonic() - started
        await burst
        if self._running:
            await asyncio.gather(*self._running)
        return code, exit_s

    # ---- the whole

    async def run(self, say: Callable[[str], None]) -> dict[str, Any]:
        """All phases; the facts for the report."""
        watching = asyncio.create_task(self.watch.run())
        try:
            await self._phase("learn", self.learn())
            say(f"{len(self.planner.known)} lone answers")
            rate = await self._phase("saturate", self.saturate())
            saturated = self._tokens_per_s("saturate")
            offered = min(rate * self.shape.factor, self.shape.max_rate)
            say(f"saturated at {rate:.2f} requests/s; offering {offered:.2f}/s for {self.shape.load_s:.0f} s")
            before = await self._phase("before", self.settle())
            if before is None:
                raise SoakError("the server did not become idle before the load")
            await self._phase("load", self.offer(offered, self.shape.load_s))
            sent, load_tokens = self.sent_well, self._tokens_per_s("load")
            idle = await self._phase("settle", self.settle())
            say(f"{sent} well-formed requests sent; now SIGTERM under load")
            self.watch.phase = "burst"
            code, exit_s = await self.stop_under_load(offered)
            say(f"the server left with {code} after {exit_s:.1f} s")
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
            await self.http.close()
            await self.grpc.close()
        facts = self._facts(rate, sent, code, exit_s)
        facts |= {"saturated_tokens_per_s": saturated, "load_tokens_per_s": load_tokens}
        found = analysis.verdicts(facts, self.watch.samples, before, idle)
        facts["verdicts"] = [dataclasses.asdict(verdict) for verdict in found]
        return facts

    async def _phase(self, name: str, work: Awaitable[T]) -> T:
        self.watch.phase = name
        return await work

    def _tokens_per_s(self, phase: str) -> float:
        points = [sample for sample in self.watch.samples if sample.phase == phase and sample.metrics]
        if len(points) < 2:
            return 0.0
        grown = points[-1].metrics["generation_tokens_total"] - points[0].metrics["generation_tokens_total"]
        return grown / (points[-1].at - points[0].at)

    def _facts(self, rate: float, sent: int, code: int | None, exit_s: float) -> dict[str, Any]:
        last = next(sample.metrics for sample in reversed(self.watch.samples) if sample.metrics)
        tally, totals = self.tally, self.tally.totals
        offered = sent / self.shape.load_s
        return {
            "saturated_rate": rate,
            "offered_rate": offered,
            "factor": self.shape.factor,
            "load_s": self.shape.load_s,
            "skipped": self.skipped,
            "max_in_flight": self.shape.max_in_flight,
            "seed": self.shape.seed,
            "counts": {name: dict(counts) for name, counts in sorted(tally.counts.items())},
            "totals": dict(totals),
            "unexplained": totals[UNEXPLAINED],
            "evidence": tally.evidence,
            "checked": tally.checked,
            "differing": tally.differing,
            "departures": ", ".join(f"{count} {name}" for name, count in sorted(tally.departures.items())) or "none",
            "latencies": {
                name: {
                    "n": len(values),
                    "total": analysis.percentiles(values),
                    "first": analysis.percentiles(tally.first_s[name]),
                }
                for name, values in sorted(tally.total_s.items())
            },
            "memory": analysis.memory(self.watch.samples),
            "missed_scrapes": self.watch.missed,
            "failed": last["requests_failed_total"],
            "generated_tokens": last["generation_tokens_total"],
            "prompt_tokens": last["prompt_tokens_total"],
            "cache_hits": last["prefix_cache_hits_total"],
            "preemptions": last["num_preemptions_total"],
            "exit_code": code,
            "exit_s": exit_s,
            "grace_s": self.shape.drain_s + _GRACE_MARGIN_S,
            "complaints": self.server.complaints(),
        }


def lead(logprobs: list[float]) -> float:
    """By how much the best of some log probabilities leads the second."""
    best, second, *_ = [*sorted(logprobs, reverse=True), -math.inf, -math.inf]
    return best - second
