"""Layers that the CPU backend computes in one call give what their operators give one by one, to the last bit."""

from __future__ import annotations

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

pytestmark = pytest.mark.skipif(not native.available(), reason="without the compiled operators")


def made(kind: type, folder: Path, how: dict[str, str], monkeypatch: pytest.MonkeyPatch, **sizes: object) -> Decoder:
    config = kind(**SIZES | {"hidden_size": 64, "num_hidden_layers": 4} | sizes)
    save(random_model(config), folder)
    tf.PreTrainedTokenizerFast(tokenizer_object=byte_level_backend()).save_pretrained(folder)
    monkeypatch.setenv("CAROUSEL_LINEAR", "native")  # float32 by whatever is fastest may be by a library
    return load_model(folder, **how).decoder


def run(decoder: Decoder) -> torch.Tensor:
    """Logits of three sequences: prompts in chunks, then decodes beside a prompt."""
    paged = PagedRun(decoder, sequences=3)
    ids = random_ids(60)
    parts = [paged.step({0: ids[:20], 1: ids[20:23]}), paged.step({0: ids[23:40], 1: ids[40:41]})]
    parts += [paged.step({0: ids[41:42], 1: ids[42:43], 2: ids[43:60]})]
    return torch.cat(parts)


@pytest.mark.parametrize(
    "how", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"}], ids=["float32", "bfloat16", "int8"]
)
@pytest.mark.parametrize("kind", [tf.LlamaConfig, tf.Qwen2Config, tf.MistralConfig])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_layer_in_one_call_is_its_operators(
    kind: type, how: dict[str, str], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"sliding_window": 24} if kind is tf.MistralConfig else {}
    decoder = made(kind, tmp_path, how, monkeypatch, **extra)
    assert all(layer.fused is not None for layer in decoder._layers)
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            fused = run(decoder)
            with monkeypatch.context() as patch:
                patch.setattr(ck, "layers_are_fused", lambda: False)
                single = run(decoder)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(fused, single)


def test_layers_with_more_norms_are_not_fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, kind in enumerate((tf.Qwen3Config, tf.Gemma2Config)):
        decoder = made(kind, tmp_path / str(number), {"dtype": "float32"}, monkeypatch, head_dim=16)
        assert all(layer.fused is None for layer in decoder._layers)


def test_another_backend_and_timing_see_every_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ck.layers_are_fused()
    with ck.use_backend("reference"):
        assert not ck.layers_are_fused()
    decoder, times = made(tf.LlamaConfig, tmp_path, {"dtype": "float32"}, monkeypatch), ck.OperatorTimes()
    with ck.time_operators(times), torch.inference_mode():
        assert not ck.layers_are_fused()
        run(decoder)
    assert times["paged_attention"].calls == 3 * 4


def test_what_does_not_fit_is_left_to_the_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = made(tf.LlamaConfig, tmp_path, {"dtype": "float32"}, monkeypatch)
    fused = decoder._layers[1].fused
    assert fused is not None
    x = torch.ones(3, 64)
    cache = decoder.allocate_kv_cache(2)[0]
    rope, positions = decoder._layers[1].rope, torch.arange(3)
    assert not fused(x.half(), x, rope, positions, None, *cache)
    assert not fused(x, x, rope, positions, None, cache[0], cache[1].bfloat16())
    monkeypatch.setattr(native, "_library", None)
    assert ck.fuse_layer(decoder._layers[1]._parts(decoder.config)) is None
