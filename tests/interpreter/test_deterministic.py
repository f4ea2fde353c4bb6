"""``--deterministic``: logits of a text are the same bits however it is scheduled, through the Triton backend."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.engine.test_engine import answers, greedy, prompt, settled
from tests.engine.test_graph_runner import RecordingDevice
from tests.engine.tiny import started_engine, tiny_model
from tests.kernels.devices import products_by_row

import carousel_kernels as ck
from carousel.config import Settings, SettingsError, load_settings
from carousel.engine.buckets import bucket_sizes
from carousel.engine.device import Device
from carousel.engine.engine import Engine
from carousel.engine.errors import EngineUnavailable
from carousel.engine.piecewise import token_buckets
from carousel.engine.request import Sequence
from carousel.engine.sampler import Draw, Sampler
from carousel.engine.scheduler import Schedule, Scheduler
from carousel.models.loader import LoadedModel
from carousel.standalone import load

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheels for this system"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny model is on the CPU, kernels on the GPU"),
]

PROMPTS = [prompt(count, seed) for seed, count in enumerate((31, 17, 1))]
LENGTH = 3
Logits = dict[tuple[int, ...], torch.Tensor]
SCHEDULE = Scheduler.schedule


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    """Of 16 tokens and features, so that these short texts have several of each."""
    from carousel_kernels.triton import config, linear

    tiles = config.AttentionConfig(16, 64, 4, 2)
    with (
        patch.object(config, "DETERMINISTIC_SPLIT", 16),
        patch.object(config, "uniform_config", lambda *_: tiles),
        patch.object(linear, "_BLOCK_K_PLAIN", 16),
        products_by_row(),
    ):
        yield


@functools.cache
def uniform_model() -> LoadedModel:
    with ck.use_backend("triton"), ck.uniform_linears():
        return tiny_model.__wrapped__()


def preempting(self: Scheduler) -> Schedule:
    """``Scheduler.schedule``, which throws the last sequence out once, when it has an output token."""
    found = Schedule()
    if self.running and self.running[-1].num_output_tokens == 1 and not self.running[-1].num_preemptions:
        self._preempt(self.running[-1], found)
    step = SCHEDULE(self)
    step.preempted += found.preempted
    return step


async def logits_of(prompts: list[list[int]], *, preempt: bool = False, **changes: object) -> Logits:
    """Of every text that was sampled from, by its tokens. Nothing is warmed up, which would take most of the time."""
    found: Logits = {}
    launch = Sampler.launch

    def noted(self: Sampler, logits: torch.Tensor, sequences: list[Sequence], last: torch.Tensor | None = None) -> Draw:
        for row, sequence in zip(logits, sequences, strict=True):
            again = found.setdefault(tuple(sequence.token_ids), row.clone())
            assert torch.equal(again, row)
        return launch(self, logits, sequences, last)

    settings = {"max_batch_sequences": len(prompts), "max_batch_tokens": 80, "deterministic": True, **changes}
    with (
        ck.use_backend("triton"),
        patch.object(Engine, "_warm_up"),
        patch.object(Sampler, "launch", noted),
        patch.object(Scheduler, "schedule", preempting if preempt else SCHEDULE),
    ):
        engine = started_engine(uniform_model(), **settings)
        try:
            await answers(engine, [greedy(ids, LENGTH) for ids in prompts])
            assert ((await settled(engine)).preemptions > 0) == preempt
        finally:
            engine.stop()
    return found


@pytest.fixture(scope="module")
def alone() -> Logits:
    """Each prompt by itself, at once: what the others must equal."""
    return asyncio.run(logits_of(PROMPTS, max_batch_sequences=1, prefix_caching=False))


@pytest.mark.parametrize("changes", [
    {},
    {"max_batch_tokens": 13},
    {"preempt": True, "prefix_caching": False},
], ids=["batched", "chunked", "preempted"])  # fmt: skip
async def test_logits_are_those_of_the_text_alone(alone: Logits, changes: dict[str, Any]) -> None:
    found = await logits_of(PROMPTS, **changes)
    assert found.keys() == alone.keys()
    assert len(found) == len(PROMPTS) * LENGTH
    assert all(torch.equal(found[text], alone[text]) for text in found)


async def test_replayed_whole_and_in_pieces(alone: Logits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill a bucket up change nothing."""
    device = RecordingDevice()
    monkeypatch.setattr(Device, "of", staticmethod(lambda _: device))
    found = await logits_of(PROMPTS, max_batch_tokens=20)
    assert device.recorded == len(bucket_sizes(len(PROMPTS))) + 2 * len(token_buckets(20))
    assert device.replayed > LENGTH
    assert found.keys() == alone.keys()
    assert all(torch.equal(found[text], alone[text]) for text in found)


async def test_with_a_warm_prefix_cache(alone: Logits) -> None:
    found = await logits_of([PROMPTS[0], PROMPTS[0]], max_batch_sequences=1)
    assert all(torch.equal(found[text], alone[text]) for text in found)


def test_the_cpu_refuses() -> None:
    with pytest.raises(SettingsError, match="--deterministic runs on GPUs only, and --device is cpu"):
        load_settings(["--device", "cpu", "--deterministic"], {})
    with pytest.raises(EngineUnavailable, match="--deterministic runs on GPUs only, and torch finds none here"):
        load(tiny_model().path, Settings(deterministic=True))
    with ck.uniform_linears(), pytest.raises(ValueError, match="uniform_linears: got a weight on the CPU"):
        ck.prepare_linear(torch.ones(4, 4))
