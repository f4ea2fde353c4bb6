"""Runs a workload on an engine in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from carousel.bench.measure import RequestResult, check, figures
from carousel.bench.record import Recorder, record
from carousel.bench.workload import WorkItem, Workload
from carousel.engine.errors import CarouselError
from carousel.engine.request import FinishReason, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from carousel.engine.engine import Engine

WARMUP_TOKENS = 8


@dataclass(slots=True)
class Progress:
    """What a run tells whoever watches it, as it goes."""

    on_tokens: Callable[[int], None] = lambda count: None
    on_request: Callable[[], None] = lambda: None


def request_of(item: WorkItem, output_len: int) -> GenerationRequest:
    """Greedy, exactly ``output_len`` tokens whatever the model says."""
    sampling = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    return GenerationRequest(
        prompt=list(item.prompt_ids) or item.prompt,
        sampling=sampling,
        tenant=item.tenant or "",
        priority=item.priority or 0,
        deadline_s=item.deadline,
    )


async def _one(engine: Engine, item: WorkItem, result: RequestResult, start: float, progress: Progress) -> None:
    seen = 0
    request = request_of(item, item.output_len)
    result.engine_id = request.request_id
    try:
        async with engine.submit(request) as stream:
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
    engine: Engine,
    workload: Workload,
    *,
    rate: float,
    concurrency: int = 0,
    progress: Progress | None = None,
    keep_record: bool = False,
) -> dict[str, Any]:
    """One measured run.

    Args:
        engine: started and idle.
        workload: what to run.
        rate: requests per second; ``math.inf`` for all at once.
        concurrency: most requests outstanding; 0 for no limit.
        progress: told of tokens and requests as they come.
        keep_record: whether the figures have a ``record``, see :mod:`carousel.bench.record`.

    Returns:
        the figures, see :func:`carousel.bench.measure.figures`.

    Raises:
        BenchError: when a request fails or has the wrong number of tokens.
    """
    progress = progress or Progress()
    recorder = Recorder()
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
            result = RequestResult(item.id, due, item.output_len, item=item)
            results.append(result)
            await _one(engine, item, result, start, progress)

    engine.timeline.observers.append(recorder)
    engine.timeline.record_seats = keep_record
    try:
        async with asyncio.TaskGroup() as tasks:
            for item, due in zip(workload.items, workload.arrivals(rate), strict=True):
                tasks.create_task(arrive(item, due))
    finally:
        engine.timeline.observers.remove(recorder)
        engine.timeline.record_seats = False
    check(results)
    found = figures(results, last_token(results), recorder.occupancy())
    return found | {"record": record(results, recorder)} if keep_record else found


def last_token(results: list[RequestResult]) -> float:
    """Seconds from the start to the last token of all."""
    return max(result.deltas[-1][0] for result in results)


async def warm_up(engine: Engine, workload: Workload, count: int) -> None:
    """Run ``count`` short requests and forget them."""
    requests = [request_of(item, min(item.output_len, WARMUP_TOKENS)) for item in workload.items[:count]]
    await asyncio.gather(*(engine.generate(request) for request in requests))
