"""Runs a workload on an engine in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from carousel.bench.measure import Occupancy, RequestResult, check, figures, summary
from carousel.bench.workload import WorkItem, Workload
from carousel.engine.errors import CarouselError
from carousel.engine.request import FinishReason, GenerationRequest, SamplingParams
from carousel.engine.timeline import RequestRecord, StepRecord

if TYPE_CHECKING:
    from carousel.engine.engine import Engine

WARMUP_TOKENS = 8


@dataclass(slots=True)
class Progress:
    """What a run tells whoever watches it, as it goes."""

    on_tokens: Callable[[int], None] = lambda count: None
    on_request: Callable[[], None] = lambda: None


class StepCollector:
    """An engine observer that keeps the steps of one run."""

    def __init__(self) -> None:
        self.steps: list[StepRecord] = []

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        if step.num_sequences:
            self.steps.append(step)

    def on_finish(self, request: RequestRecord) -> None:
        """Requests are measured where their tokens arrive, not here."""

    def occupancy(self) -> Occupancy:
        count = len(self.steps)
        return Occupancy(
            sequences=summary(step.num_sequences for step in self.steps),
            mean_tokens_per_step=sum(step.num_tokens for step in self.steps) / count if count else None,
            steps=count,
            preemptions=sum(step.num_preemptions for step in self.steps),
            recomputed_tokens=sum(step.num_recomputed_tokens for step in self.steps),
        )


def request_of(item: WorkItem, output_len: int) -> GenerationRequest:
    """Greedy, exactly ``output_len`` tokens whatever the model says."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    return GenerationRequest(prompt=list(item.prompt_ids) or item.prompt, sampling=sampling)


async def _one(engine: Engine, item: WorkItem, result: RequestResult, start: float, progress: Progress) -> None:
    seen = 0
    try:
        async with engine.submit(request_of(item, item.output_len)) as stream:
            async for output in stream:
                now = time.perf_counter() - start
                if count := len(output.token_ids):
                    result.deltas.append((now, count))
                    seen += count
                    progress.on_tokens(count)
                if output.finish_reason is not None:
                    result.finished = now
                    result.prompt_tokens = output.prompt_tokens
                    result.queue = output.timings.queue_s if output.timings else None
                    if output.finish_reason is not FinishReason.LENGTH:
                        result.error = f"ended by {output.finish_reason.value}: {output.error or output.stop_reason}"
    except CarouselError as error:
        result.error = f"{type(error).__name__}: {error}"
    result.output_tokens = seen
    progress.on_request()


async def run(
    engine: Engine, workload: Workload, *, rate: float, concurrency: int = 0, progress: Progress | None = None
) -> dict[str, Any]:
    """One measured run.

    Args:
        engine: started and idle.
        workload: what to run.
        rate: requests per second; ``math.inf`` for all at once.
        concurrency: most requests outstanding; 0 for no limit.

    Returns:
        the figures, see :func:`carousel.bench.measure.figures`.

    Raises:
        BenchError: when a request fails or has the wrong number of tokens.
    """
    progress = progress or Progress()
    collector = StepCollector()
    results: list[RequestResult] = []
    gate = asyncio.Semaphore(concurrency) if concurrency else None
    start = time.perf_counter()

    async def arrive(item: WorkItem, due: float) -> None:
        if (wait := start + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        async with AsyncExitStack() as stack:
            if gate is not None:
                await stack.enter_async_context(gate)
                due = time.perf_counter() - start
            result = RequestResult(item.id, due, item.output_len)
            results.append(result)
            await _one(engine, item, result, start, progress)

    engine.timeline.observers.append(collector)
    try:
        async with asyncio.TaskGroup() as tasks:
            for item, due in zip(workload.items, workload.arrivals(rate), strict=True):
                tasks.create_task(arrive(item, due))
    finally:
        engine.timeline.observers.remove(collector)
    check(results)
    return figures(results, last_token(results), collector.occupancy())


def last_token(results: list[RequestResult]) -> float:
    """Seconds from the start to the last token of all."""
    return max(result.deltas[-1][0] for result in results)


async def warm_up(engine: Engine, workload: Workload, count: int) -> None:
    """Run ``count`` short requests and forget them."""
    requests = [request_of(item, min(item.output_len, WARMUP_TOKENS)) for item in workload.items[:count]]
    await asyncio.gather(*(engine.generate(request) for request in requests))
