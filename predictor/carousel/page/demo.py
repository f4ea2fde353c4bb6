"""A synthetic load for those who try the server: the same requests under static and under continuous batching.

Bounded in count and in time, from a fixed list, one at a time. It runs beside whatever else the server serves, and the
way the batch is filled is put back when a comparison ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from dataclasses import dataclass
from typing import Any, Protocol

from carousel.engine.errors import CarouselError, InvalidRequest
from carousel.engine.request import GenerationRequest, SamplingParams
from carousel.lifecycle import EngineLike

logger = logging.getLogger("carousel.page")

NUM_REQUESTS = 24
ARRIVALS_S = 4.0
"""Over how long the requests of one run arrive."""

LONGEST_RUN_S = 120.0
TENANTS = ("demo-red", "demo-green", "demo-blue")
_TEXT = (
    "A carousel turns, and whoever wants a ride steps on while it is moving; whoever has had enough steps off. Nobody "
    "waits for the longest ride to end. That is the whole idea of continuous batching, and this is its demonstration. "
)
_ACTIONS = ("load", "compare", "static", "continuous", "stop")


class DemoEngine(EngineLike, Protocol):
    """An engine whose batch can be filled in another way while it runs."""

    def set_batching(self, static: bool) -> bool: ...


@dataclass(frozen=True, slots=True)
class Planned:
    """One request of the load. ``after_s``: when it arrives. Lengths in tokens."""

    after_s: float
    prompt_tokens: int
    output_tokens: int
    shares_prefix: bool
    tenant: str


def plan(longest: int, seed: int = 7) -> list[Planned]:
    """The load: many short answers and a few long ones, half of the prompts with a common beginning.

    ``longest``: tokens that prompt and answer may have together.
    """
    rng = random.Random(seed)
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = rng.randint(24, 160)
        output = rng.randint(8, 32) if rng.random() < 0.7 else rng.randint(64, 128)
        scale = min(1.0, (longest - 2) / (160 + 128))
        requests.append(
            Planned(
                after_s=number * ARRIVALS_S / NUM_REQUESTS,
                prompt_tokens=max(1, int(prompt * scale)),
                output_tokens=max(1, int(output * scale)),
                shares_prefix=number % 2 == 0,
                tenant=TENANTS[number % len(TENANTS)],
            )
        )
    return requests


class Demo:
    """One run at a time. Belongs to the event loop's thread. ``static``: how the batch is filled at first."""

    def __init__(self, static: bool) -> None:
        self.static = static
        self.running = ""
        self.results: dict[str, dict[str, float]] = {}
        self.problem = ""
        self._task: asyncio.Task[None] | None = None
        self._done = 0
        self._runs = 0

    def state(self) -> dict[str, Any]:
        """For the page: what runs, how far it is, and the last result of each way to fill the batch."""
        return {
            "running": self.running,
            "done": self._done,
            "of": NUM_REQUESTS,
            "results": self.results,
            "problem": self.problem,
        }

    def act(self, engine: DemoEngine, action: object) -> None:
        """Do what a button of the page says.

        Raises:
            InvalidRequest: there is no such action, or a run is under way.
        """
        if action == "stop":
            self.stop()
        elif action not in _ACTIONS:
            raise InvalidRequest("do", action, " or ".join(_ACTIONS))
        elif self._task is not None and not self._task.done():
            raise InvalidRequest("do", action, "stop, while a run is under way")
        elif action in ("static", "continuous"):
            engine.set_batching(action == "static")
            self.static = action == "static"
        else:
            self.problem = ""
            self._task = asyncio.create_task(self._run(engine, [True, False] if action == "compare" else [self.static]))

    def stop(self) -> None:
        """End what runs."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, engine: DemoEngine, ways: list[bool]) -> None:
        try:
            for static in ways:
                engine.set_batching(static)
                self.running, self._done = "static" if static else "continuous", 0
                async with asyncio.timeout(LONGEST_RUN_S):
                    self.results = {**self.results, self.running: await self._load(engine)}
        except TimeoutError:
            self.problem = f"the load did not finish within {LONGEST_RUN_S:g} s and was ended"
        except CarouselError as error:
            self.problem = str(error)
        except ExceptionGroup as group:
            self.problem = "; ".join(dict.fromkeys(str(error) for error in group.exceptions))
        finally:
            self.running = ""
            with contextlib.suppress(CarouselError):
                engine.set_batching(self.static)

    async def _load(self, engine: EngineLike) -> dict[str, float]:
        """Run the load once and measure it as its clients see it. Times in seconds, rates in tokens per second."""
        self._runs += 1
        text = engine.tokenizer.encode(_TEXT * 4, add_special_tokens=False)
        started = time.monotonic()
        first: list[float] = []
        tokens = 0

        async def one(number: int, planned: Planned) -> None:
            nonlocal tokens
            await asyncio.sleep(planned.after_s)
            begin = 0 if planned.shares_prefix else 1 + number
            prompt = [text[(begin + i) % len(text)] for i in range(planned.prompt_tokens)]
            request = GenerationRequest(
                prompt=prompt,
                sampling=SamplingParams(temperature=0.0, max_tokens=planned.output_tokens, ignore_eos=True),
                tenant=planned.tenant,
                timeout_s=LONGEST_RUN_S,
                cache_salt=f"demo-{self._runs}",  # no run profits from what the one before has left in the cache
            )
            submitted, waited = time.monotonic(), None
            async with engine.submit(request) as stream:
                async for output in stream:
                    if output.token_ids and waited is None:
                        waited = time.monotonic() - submitted
                    tokens += len(output.token_ids)
            if waited is not None:
                first.append(waited)
            self._done += 1

        async with asyncio.TaskGroup() as group:
            for number, planned in enumerate(plan(engine.max_model_len)):
                group.create_task(one(number, planned))
        took = time.monotonic() - started
        first.sort()
        return {
            "seconds": round(took, 3),
            "tokens": tokens,
            "tokens_per_s": round(tokens / took, 1),
            "ttft_mean": round(sum(first) / max(len(first), 1), 4),
            "ttft_max": round(max(first, default=0.0), 4),
        }
