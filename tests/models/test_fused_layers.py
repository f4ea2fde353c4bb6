"""Layers that the CPU backend computes in one call give what their operators give one by one, to the last bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf
from tests.models.harness import SIZES, PagedRun, random_ids, random_model, save
from tests.models.test_tokenizer import byte_level_backend

import carousel_kernels as ck
from carousel.models.decoder import Decoder
from carousel.models.loader import load_model
from carousel_kernels.cpu import native
from carousel_kernels.layout import BatchLayout

pytestmark = pytest.mark.skipif(not native.available(), reason="without the compiled operators")


def made(kind: type, folder: Path, how: dict[str, str], monkeypatch: pytest.MonkeyPatch, **sizes: object) -> Decoder:
    config = kind(**SIZES | {"hidden_size": 64, "num_hidden_layers": 4} | sizes)
    save(random_model(config), folder)
    tf.PreTrainedTokenizerFast(tokenizer_object=byte_level_backend()).save_pretrained(folder)
    monkeypatch.setenv("CAROUSEL_LINEAR", "native")  # float32 by whatever is fastest may be by a library
    return load_model(folder, **how).decoder


def run(decoder: Decoder, long: int = 40) -> torch.Tensor:
    """Logits of three sequences: prompts in chunks, then decodes beside a long prompt, of which few rows are wanted,
    and then none."""
    paged = PagedRun(decoder, sequences=3)
    ids = random_ids(60 + 3 * long)
    parts = [paged.step({0: ids[:20], 1: ids[20:23]}), paged.step({0: ids[23:40], 1: ids[40:41]})]
    parts += [paged.step({0: ids[41:42], 1: ids[42:43], 2: ids[43 : 43 + long]}, rows=[0, 1, long + 1])]
    parts += [paged.step({0: ids[50 : 50 + long], 2: ids[90:91]}, rows=[])]
    parts += [paged.step({1: ids[60 : 60 + long], 2: ids[60:61]})]
    return torch.cat(parts)


KINDS = {
    "llama": (tf.LlamaConfig, {}),
    "halves share a block": (tf.LlamaConfig, {"intermediate_size": 48}),
    "biases": (tf.Qwen2Config, {}),
    "windows": (tf.MistralConfig, {"sliding_window": 24}),
    "norms of heads": (tf.Qwen3Config, {"head_dim": 16}),
    "post-norms, softcap, two windows": (tf.Gemma2Config, {"head_dim": 32, "sliding_window": 24}),
    "no positions in some layers": (tf.SmolLM3Config, {"no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False}),
}


@pytest.mark.parametrize(
    "how", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["float32", "bfloat16", "int8"]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2])
def test_layers_in_one_call_are_their_operators(
    kind: str, how: dict[str, str], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, sizes = KINDS[kind]
    decoder = made(config, tmp_path, how, monkeypatch, **{"intermediate_size": 96} | sizes)
    assert decoder._fused is not None
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            fused = run(decoder), run(decoder, long=150)  # the latter in tiles of rows
            with monkeypatch.context() as patch:
                patch.setattr(ck, "layers_are_fused", lambda: False)
                single = run(decoder), run(decoder, long=150)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(fused[0], single[0])
    assert torch.equal(fused[1], single[1])


def test_another_backend_and_timing_see_every_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ck.layers_are_fused()
    with ck.use_backend("reference"):
        assert not ck.layers_are_fused()
    decoder, times = made(tf.LlamaConfig, tmp_path, {"dtype": "float32"}, monkeypatch), ck.OperatorTimes()
    with ck.time_operators(times), torch.inference_mode():
        assert not ck.layers_are_fused()
        run(decoder)
    assert times["paged_attention"].calls == 5 * 4


def test_what_does_not_fit_is_left_to_the_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = made(tf.LlamaConfig, tmp_path, {"dtype": "float32"}, monkeypatch)
    fused, parts = decoder._fused, [layer.parts(decoder.config) for layer in decoder._layers]
    assert fused is not None
    caches, positions = decoder.allocate_kv_cache(2), torch.arange(3)
    layout = BatchLayout(
        query_start=torch.tensor([0, 3], dtype=torch.int32), context_lens=torch.tensor([3], dtype=torch.int32),
        block_tables=torch.tensor([[1]], dtype=torch.int32), slots=positions + 16, query_lens_host=[3],
        context_lens_host=[3], num_decodes=0,
    )  # fmt: skip
    assert fused(torch.ones(3, 64), positions, layout, caches, decoder._tables, None) is not None
    assert fused(torch.ones(3, 64).half(), positions, layout, caches, decoder._tables, None) is None
    assert fused(torch.ones(3, 64), positions.int(), layout, caches, decoder._tables, None) is None
    mixed = [*caches[:2], (caches[2][0], caches[2][1].bfloat16()), caches[3]]
    assert fused(torch.ones(3, 64), positions, layout, mixed, decoder._tables, None) is None
    tables = [None if table is None else table.double() for table in decoder._tables]
    assert fused(torch.ones(3, 64), positions, layout, caches, tables, None) is None
    assert ck.fuse_layers([*parts[:1], replace(parts[1], qkv=lambda x: x)]) is None
    assert ck.fuse_layers([*parts[:1], replace(parts[1], qkv=parts[1].output)]) is None
    assert ck.fuse_layers([replace(parts[0], mlp_norm=parts[0].mlp_norm.bfloat16())]) is None
    monkeypatch.setattr(native, "_library", None)
    assert ck.fuse_layers(parts) is None


def test_a_longer_context_brings_new_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = made(tf.LlamaConfig, tmp_path, {"dtype": "float32"}, monkeypatch)
    monkeypatch.setattr(decoder, "_rope_rows", 0)
    with torch.inference_mode():
        decoder.reserve_positions(20)
        short = decoder._tables
        got = run(decoder)
        assert decoder._tables is not short
        assert torch.equal(run(decoder), got)
