"""The engine's promises through the Triton backend: greedy answers do not depend on how they are scheduled.

In Triton's interpreter (see tests/conftest.py) a step takes a fifth of a second, so the answers are few and short; they
are compared with those of the reference backend, each computed alone, token by token.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tests.engine.test_engine import answers, greedy, prompt, settled
from tests.engine.tiny import kv_memory, started_engine, tiny_model
from tests.models.harness import SIZES, logits_in_chunks, random_ids, random_model, save
from tests.models.harness import load as load_decoder
from tests.models.test_families import CASES

import carousel_kernels as ck
from carousel.config import Settings, SettingsError, load_settings
from carousel.engine.engine import Engine
from carousel.engine.errors import EngineUnavailable
from carousel.engine.sampler import Sampler
from carousel.standalone import load

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton has no wheels for this system"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny model is on the CPU, kernels on the GPU"),
]


async def expected(prompts: list[list[int]], length: int) -> list[list[int]]:
    engine = started_engine(max_batch_sequences=1)
    try:
        with ck.use_backend("reference"):
            return [(await answers(engine, [greedy(ids, length)]))[0] for ids in prompts]
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("prompt_lengths", "length", "changes"),
    [
        ((30, 17, 1), 4, {"max_batch_tokens": 48}),
        ((30, 15), 3, {"max_batch_tokens": 12}),
        ((14, 15), 20, {"max_batch_tokens": 32, "kv_cache_memory": kv_memory(4), "prefix_caching": False}),
    ],
    ids=["batched", "chunked", "preempted"],
)
async def test_greedy_answers_are_the_reference_s(
    prompt_lengths: tuple[int, ...], length: int, changes: dict[str, object]
) -> None:
    prompts = [prompt(count, seed) for seed, count in enumerate(prompt_lengths)]
    wanted = await expected(prompts, length)
    with ck.use_backend("triton"):
        engine = started_engine(max_batch_sequences=len(prompts), **changes)
        try:
            assert await answers(engine, [greedy(ids, length) for ids in prompts]) == wanted
            assert ((await settled(engine)).preemptions > 0) == ("kv_cache_memory" in changes)
        finally:
            engine.stop()


async def test_alone_and_with_a_warm_prefix_cache() -> None:
    ids = prompt(30)
    wanted = await expected([ids], 3)
    with ck.use_backend("triton"):
        engine = started_engine(max_batch_tokens=32, max_batch_sequences=1)
        try:
            for _ in range(2):
                assert await answers(engine, [greedy(ids, 3)]) == wanted
            assert (await settled(engine)).prefix_cache_hits > 0
        finally:
            engine.stop()


@pytest.mark.parametrize("case", ["qwen3", "gemma3"])
def test_norms_of_queries_and_keys_with_the_rotary_embedding(case: str, tmp_path: Path) -> None:
    """In one kernel, with the write of keys and values."""
    kind, changes = CASES[case]
    decoder = load_decoder(save(random_model(kind(**{**SIZES, **changes})), tmp_path))
    ids, sizes = random_ids(24), [9, 1, 14]
    with ck.use_backend("triton"):
        found = logits_in_chunks(decoder, ids, sizes)
    with ck.use_backend("reference"):
        torch.testing.assert_close(found, logits_in_chunks(decoder, ids, sizes), rtol=1e-3, atol=1e-3)


async def test_with_keys_and_values_in_fp8() -> None:
    """Half or a quarter of the memory, and nearly the same logits: two blocks of such a pool are one of the other."""
    model = tiny_model()
    halved = copy.copy(model.decoder)
    halved.kv_dtype = torch.float8_e4m3fn
    assert halved.kv_bytes_per_token * 4 == model.decoder.kv_bytes_per_token
    seen: list[torch.Tensor] = []
    launch = Sampler.launch

    def noted(self: Sampler, logits: torch.Tensor, *arguments: object) -> object:
        seen.append(logits.clone())
        return launch(self, logits, *arguments)  # type: ignore[arg-type]

    for decoder, backend in ((model.decoder, "reference"), (halved, "triton")):
        with ck.use_backend(backend), patch.object(Engine, "_warm_up"):
            engine = started_engine(dataclasses.replace(model, decoder=decoder), max_batch_tokens=32)
            try:
                with patch.object(Sampler, "launch", noted):
                    await answers(engine, [greedy(prompt(30), 1)])
            finally:
                engine.stop()
    exact, rounded = seen
    assert 0 < float((exact - rounded).abs().max()) < 0.1 * float(exact.abs().max())


def test_fp8_is_refused_where_it_does_not_run() -> None:
    with pytest.raises(SettingsError, match="--kv-cache-dtype fp8 runs on GPUs only, and --device is cpu"):
        load_settings(["--device", "cpu", "--kv-cache-dtype", "fp8"], {})
    with pytest.raises(EngineUnavailable, match="--kv-cache-dtype fp8 runs on GPUs only, and torch finds none here"):
        load(tiny_model().path, Settings(kv_cache_dtype="fp8"))
    with pytest.raises(SettingsError, match="--kv-cache-dtype bfloat16 is for --device cpu: on a GPU choose auto"):
        load_settings(["--device", "cuda", "--kv-cache-dtype", "bfloat16"], {})
