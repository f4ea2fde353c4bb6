"""Nothing is compiled while serving: what the engine's start has launched are all the variants of kernels there are.

Triton compiles a kernel for each combination of compile-time arguments, types, integers that are 1 or divisible by 16,
and pointers that are divisible by 16; each takes a second or so, in which no stream gets a token.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.engine.test_engine import greedy, prompt
from tests.engine.test_graph_runner import RecordingDevice
from tests.engine.tiny import started_engine

import carousel_kernels as ck
from carousel.engine.device import Device
from carousel.engine.request import GenerationRequest, SamplingParams

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheels for this system"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the launches of the interpreter are watched"),
]


def variant(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[object, ...]:
    """What Triton would compile for this launch, as far as it tells launches apart."""
    parameters = inspect.signature(kernel.fn).parameters
    options = {name: value for name, value in named.items() if name not in parameters}
    bound = inspect.signature(kernel.fn).bind(*arguments, **{n: v for n, v in named.items() if n in parameters})
    plain = kernel.kwargs.get("do_not_specialize") or ()
    found: list[object] = [kernel.fn.__name__, tuple(sorted(options.items()))]
    for name, value in bound.arguments.items():
        if "constexpr" in str(parameters[name].annotation) or value is None or isinstance(value, bool):
            found.append((name, value))
        elif isinstance(value, torch.Tensor):
            found.append((name, value.dtype, value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and name not in plain:
            found.append((name, value == 1, value % 16 == 0))
    return tuple(found)


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[object, ...]]]:
    """All that is launched."""
    from triton.runtime.interpreter import InterpretedFunction

    found: set[tuple[object, ...]] = set()
    run = InterpretedFunction.run

    def noted(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        found.add(variant(self, arguments, named))
        return run(self, *arguments, grid=grid, warmup=warmup, **named)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    return found


def requests() -> list[GenerationRequest]:
    """Prompts around the borders of blocks and tiles, and every kind of sampling."""
    costly = SamplingParams(temperature=1.0, top_k=5, top_p=0.8, seed=1, logprobs=7, prompt_logprobs=2, max_tokens=2)
    plain = SamplingParams(temperature=1.0, seed=1, max_tokens=2)
    return [
        *(greedy(prompt(length, length), 2) for length in (2, 16, 33)),
        GenerationRequest(prompt=prompt(20, 9), sampling=costly),
        GenerationRequest(prompt=prompt(5, 8), sampling=plain),
    ]


async def test_serving_launches_only_what_the_start_has(
    variants: set[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = RecordingDevice()
    device.compiles = True
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: device))
    with ck.use_backend("triton"):
        engine = started_engine(max_batch_sequences=2, max_batch_tokens=20, async_scheduling="on")
        try:
            known = set(variants)
            assert len(known) > 8
            await asyncio.gather(*map(engine.generate, requests()))
            await engine.generate(greedy(prompt(1), 2))
        finally:
            engine.stop()
    assert variants == known
