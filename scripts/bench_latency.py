"""Two promises about latency, each measured beside its own baseline in one run of the engine, in-process.

    .venv/bin/python scripts/bench_latency.py interference    # inter-token latency while a long prompt enters
    .venv/bin/python scripts/bench_latency.py prefix          # time to first token behind a cached prefix

``interference``: streams run; then a prompt of 4,000 tokens enters beside them. The latency between the tokens of the
streams is taken over as much time without the prompt as with it (the time from its arrival to its first token), in
turns. ``prefix``: 16 clients ask short questions, in turns with and without 1,024 shared tokens in front; all of them
at once, and then each as soon as it has its last answer, of 16 to 64 tokens.
Flags of `carousel serve` that name the model and the engine's settings may follow ``--``.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Sequence

from bench_run import percentile
from carousel.config import Settings, load_settings
from carousel.engine.engine import Engine
from carousel.engine.request import GenerationRequest, SamplingParams
from carousel.standalone import engines

LONG, SHARED, QUESTION = 4000, 1024, 24
ANSWER = 16, 64  # tokens, any number between
_draw = random.Random(0)


def tokens(count: int) -> list[int]:
    """Ordinary tokens at random: no two prompts share a prefix."""
    return [_draw.randrange(1000, 20_000) for _ in range(count)]


def request(prompt: list[int], output: int) -> GenerationRequest:
    sampling = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return GenerationRequest(prompt=prompt, sampling=sampling)


async def first_token(engine: Engine, prompt: list[int], output: int = 1) -> float:
    """Seconds from arrival to the first token of a whole answer."""
    started, first = time.perf_counter(), None
    async with engine.submit(request(prompt, output)) as stream:
        async for delta in stream:
            if first is None and delta.token_ids:
                first = time.perf_counter() - started
    assert first is not None
    return first


def milliseconds(values: Sequence[float], share: float) -> str:
    return f"{1e3 * percentile(values, share):.1f} ms"


async def interference(engine: Engine, streams: int, rounds: int) -> None:
    arrivals: list[tuple[float, float]] = []  # when a token came, and how long after the one before
    started = asyncio.Event()

    async def stream() -> None:
        before = None
        async with engine.submit(request(tokens(64), engine.max_model_len - 64)) as deltas:
            async for delta in deltas:
                now = time.perf_counter()
                started.set()
                if before is not None and delta.token_ids:
                    arrivals.append((now, (now - before) / len(delta.token_ids)))
                before = now

    tasks = [asyncio.create_task(stream()) for _ in range(streams)]
    await started.wait()
    await asyncio.sleep(2.0)
    ratios = []
    for number in range(rounds):
        begin = time.perf_counter()
        first_s = await first_token(engine, tokens(LONG))
        middle = time.perf_counter()
        await asyncio.sleep(0.5)
        calm = time.perf_counter()
        await asyncio.sleep(first_s)
        end = time.perf_counter()
        beside = [gap for at, gap in arrivals if begin <= at <= middle]
        alone = [gap for at, gap in arrivals if calm <= at <= end]
        ratios.append(percentile(beside, 0.99) / percentile(alone, 0.99))
        print(
            f"round {number + 1}: alone p50 {milliseconds(alone, 0.5)}, p99 {milliseconds(alone, 0.99)}; beside p50 "
            f"{milliseconds(beside, 0.5)}, p99 {milliseconds(beside, 0.99)}: {ratios[-1]:.2f} x; "
            f"the prompt's first token after {first_s:.2f} s",
            flush=True,
        )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(
        f"inter-token latency, p99, of {streams} streams while {LONG} prompt tokens enter: "
        f"{statistics.median(ratios):.2f} x of without (median of {rounds} rounds)"
    )


async def ask(engine: Engine, front: list[int], times: int, found: list[float]) -> None:
    """A client with one question after another. Of several the first is not counted: all clients' come at once, later
    ones when the last answer is there."""
    for turn in range(times):
        seconds = await first_token(engine, front + tokens(QUESTION), _draw.randint(*ANSWER))
        if turn or times == 1:
            found.append(seconds)


async def prefix(engine: Engine, clients: int, rounds: int) -> None:
    shared = tokens(SHARED)
    await first_token(engine, shared)
    for name, times in (("all at once", 1), ("each as soon as its last answer is there", 6)):
        with_prefix: list[float] = []
        without: list[float] = []
        took = {id(without): 0.0, id(with_prefix): 0.0}
        for _ in range(rounds):
            for found, front in ((without, []), (with_prefix, shared)):
                started = time.perf_counter()
                await asyncio.gather(*(ask(engine, front, times, found) for _ in range(clients)))
                took[id(found)] += time.perf_counter() - started
        ratio = statistics.median(with_prefix) / statistics.median(without)
        print(
            f"time to first token, median of {rounds} x {clients} clients, {name}: {milliseconds(without, 0.5)} "
            f"without, {milliseconds(with_prefix, 0.5)} behind {SHARED} cached tokens: {ratio:.2f} x; "
            f"answers in {took[id(with_prefix)] / took[id(without)]:.2f} x the time"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("interference", "prefix"))
    parser.add_argument("--clients", type=int, help="streams or clients at a time (default 8 and 16)")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.usage = "%(prog)s [-h] [--clients N] [--rounds N] {interference,prefix} [-- FLAG ...]"
    own = sys.argv[1:]
    end = own.index("--") if "--" in own else len(own)
    options = parser.parse_args(own[:end])
    settings: Settings = load_settings(own[end + 1 :], {})
    engine = engines(settings)(settings)
    try:
        if options.what == "interference":
            asyncio.run(interference(engine, options.clients or 8, options.rounds))
        else:
            asyncio.run(prefix(engine, options.clients or 16, options.rounds))
    finally:
        engine.stop()


if __name__ == "__main__":
    main()
