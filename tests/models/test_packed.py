"""Checkpoints that are quantised already: logits equal transformers' on the weights that the format stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tests.models.harness import SIZES, expected_logits, logits_in_chunks, random_ids, random_model
from tests.models.test_parallel import among

import carousel_kernels as ck
from carousel.models.decoder import Decoder
from carousel.models.errors import ModelLoadError
from carousel.models.families import decoder_config
from carousel.models.loader import load_model
from carousel.models.packed import PackedSource, PackedWeights, scheme_of_checkpoint
from carousel.models.parallel import ALONE
from carousel.models.weights import open_safetensors

CONFIG = {**SIZES, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
GROUP = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
IDS = random_ids(20)
Tensors = dict[str, torch.Tensor]


def words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., 32 / bits] -> int32 [...], the first in the lowest bits; in Python's integers."""
    packed = [sum(int(v) << (bits * i) for i, v in enumerate(part)) for part in values.reshape(-1, 32 // bits)]
    return torch.tensor([w - 2**32 if w >= 2**31 else w for w in packed], dtype=torch.int32).view(values.shape[:-1])


def by_groups(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Integers [N, K], zero points and scales [N, G], and the weight that they stand for."""
    parts = weight.unflatten(1, (-1, GROUP))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    scale = ((high - low) / (2**bits - 1)).half().float()
    zero = (-low / scale).round().clamp(1, 2**bits - 1)
    q = (parts / scale + zero).round().clamp(0, 2**bits - 1)
    return q.flatten(1), zero.squeeze(-1), scale.squeeze(-1), ((q - zero) * scale).flatten(1)


def gptq(weight: torch.Tensor, bits: int = 4, offset: int = 1, shuffled: bool = False) -> tuple[Tensors, torch.Tensor]:
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(2))
    order = order if shuffled else order.sort().values
    q, zero, scale, dense = by_groups(weight[:, order], bits)
    back = order.argsort()
    per_word = 32 // bits
    stored = q[:, back].T.unflatten(0, (-1, per_word)).transpose(1, 2)
    return {
        "qweight": words(stored, bits),
        "qzeros": words((zero - offset).T.unflatten(1, (-1, per_word)), bits),
        "scales": scale.T.half().contiguous(),
        "g_idx": (back // GROUP).int(),
    }, dense[:, back]


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    q, zero, scale, dense = by_groups(weight, 4)
    order = list(AWQ_ORDER)
    return {
        "qweight": words(q.T.unflatten(1, (-1, 8))[..., order], 4),
        "qzeros": words(zero.T.unflatten(1, (-1, 8))[..., order], 4),
        "scales": scale.T.half().contiguous(),
    }, dense


def scales_of(weight: torch.Tensor, rows: int, columns: int, largest: float) -> torch.Tensor:
    """Of blocks of rows x columns: [N / rows, K / columns]."""
    blocks = weight.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    return blocks.abs().amax((1, 3)) / largest


def scaled(weight: torch.Tensor, kind: str, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensors, torch.Tensor]:
    largest = 448.0 if dtype == torch.float8_e4m3fn else 127.0
    rows, columns = {"tensor": tuple(weight.shape), "channel": (1, weight.shape[1]), "block": (16, 32)}[kind]
    scale = scales_of(weight, rows, columns, largest)
    spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    q = weight / spread
    q = q.round().to(dtype) if dtype == torch.int8 else q.to(dtype)
    name = "weight_scale_inv" if kind == "block" else "weight_scale"
    extra = {} if kind == "block" else {"input_scale": torch.ones(1)}
    stored = scale.reshape(()) if kind == "tensor" else scale
    return {"weight": q, name: stored, **extra}, q.float() * spread


def packed(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    parts = weight.unflatten(1, (-1, GROUP))
    scale = (parts.abs().amax(-1, keepdim=True) / 7).half().float()
    q = (parts / scale).round().clamp(-8, 7)
    return {
        "weight_packed": words((q + 8).flatten(1).unflatten(1, (-1, 8)), 4),
        "weight_scale": scale.squeeze(-1).half(),
        "weight_shape": torch.tensor(weight.shape),
    }, (q * scale).flatten(1)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
Maker = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
FORMATS: dict[str, tuple[dict[str, Any], Maker]] = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}, gptq),
    "gptq-act-order": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda w: gptq(w, shuffled=True),
    ),
    "gptq-8-v2": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        lambda w: gptq(w, bits=8, offset=0),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}, awq),
    "fp8-blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 32], "activation_scheme": "dynamic"},
        lambda w: scaled(w, "block"),
    ),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, lambda w: scaled(w, "tensor")),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, lambda w: scaled(w, "channel")),
    "compressed-fp8": (compressed("float-quantized", strategy="channel", **FP8), lambda w: scaled(w, "channel")),
    "compressed-int8": (
        compressed("int-quantized", strategy="channel", **INT8),
        lambda w: scaled(w, "channel", torch.int8),
    ),
    "compressed-int4": (compressed("pack-quantized", **INT4), packed),
}


def checkpoint(directory: Path, form: str, kind: Any = tf.LlamaConfig, **changes: Any) -> tf.PreTrainedModel:
    """Write a quantised checkpoint; returns the model with the weights that it stands for."""
    config, make = FORMATS[form]
    model = random_model(kind(**{**CONFIG, "tie_word_embeddings": False, **changes}))
    model.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    state = model.state_dict()
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        stored, dense = make(tensors.pop(name))
        layer = name.removesuffix(".weight")
        tensors |= {f"{layer}.{field}": tensor.contiguous() for field, tensor in stored.items()}
        state[name].copy_(dense)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)  # of an FP8 cache, as some have it
    save_file(tensors, directory / "model.safetensors")
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": config}))
    return model


def source_of(directory: Path) -> tuple[Any, PackedSource]:
    hf = json.loads((directory / "config.json").read_text())
    scheme = scheme_of_checkpoint(hf)
    assert scheme is not None
    return decoder_config(hf), PackedSource(open_safetensors(directory), scheme)


@pytest.mark.parametrize("form", FORMATS)
def test_widened_on_the_cpu(form: str, tmp_path: Path) -> None:
    expected = expected_logits(checkpoint(tmp_path, form), IDS)
    config, source = source_of(tmp_path)
    torch.testing.assert_close(logits_in_chunks(Decoder(config, source), IDS, [13, 1]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMATS)
def test_packed_as_a_gpu_takes_them(form: str, tmp_path: Path) -> None:
    model = checkpoint(tmp_path, form, tf.Qwen2Config)
    config, source = source_of(tmp_path)
    weights = PackedWeights(source, config, torch.device("cpu"), torch.float32)
    with ck.use_backend("triton"):
        decoder = Decoder(config, weights)  # whose linear layers are that backend's from now on
    got = logits_in_chunks(decoder, IDS, [13, 7])
    torch.testing.assert_close(got, expected_logits(model, IDS), rtol=1e-3, atol=1e-3)
    plain = Decoder(config, source)
    assert decoder.weight_bytes < 0.75 * plain.weight_bytes


@pytest.mark.parametrize("form", ["gptq", "awq", "fp8-blocks", "compressed-fp8"])
def test_fused_in_the_checkpoint_and_split_among_ranks(form: str, tmp_path: Path) -> None:
    expected = expected_logits(checkpoint(tmp_path, form, tf.Phi3Config), IDS)

    def logits(ranks: Any) -> torch.Tensor:
        config, source = source_of(tmp_path)
        weights = PackedWeights(source, config, torch.device("cpu"), torch.float32, ranks)
        return logits_in_chunks(Decoder(config, weights), IDS, [13, 7])

    for result in (logits(ALONE), *among(2, logits)):
        torch.testing.assert_close(result, expected, rtol=1e-3, atol=1e-3)


def test_multipliers_are_folded_into_scales(tmp_path: Path) -> None:
    model = checkpoint(tmp_path, "gptq", tf.GraniteConfig, residual_multiplier=0.3, attention_multiplier=0.2)
    config, source = source_of(tmp_path)
    decoder = Decoder(config, PackedWeights(source, config, torch.device("cpu"), torch.float32))
    torch.testing.assert_close(logits_in_chunks(decoder, IDS, [20]), expected_logits(model, IDS), rtol=1e-3, atol=1e-3)


def test_act_order_is_not_split_among_ranks(tmp_path: Path) -> None:
    checkpoint(tmp_path, "gptq-act-order")
    config, source = source_of(tmp_path)
    with pytest.raises(ModelLoadError, match=r"o_proj cannot be split among 2 ranks: .*act order"):
        among(2, lambda ranks: PackedWeights(source, config, torch.device("cpu"), torch.float32, ranks) and Decoder(
            config, PackedWeights(source, config, torch.device("cpu"), torch.float32, ranks)))  # fmt: skip


def test_loading_says_what_it_was_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint(tmp_path, "awq")
    monkeypatch.setattr("carousel.models.loader.load_tokenizer", lambda *_: None)
    said: list[str] = []
    load_model(tmp_path, log=said.append)
    assert "float32 on cpu, from AWQ in 4 bits, widened" in said[0]
    load_model(tmp_path, quantization="int8", log=said.append)
    assert "from AWQ in 4 bits, widened, quantised now" in said[1]


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    checkpoint(tmp_path, "gptq")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.down_proj.scales"]
    save_file(tensors, tmp_path / "model.safetensors")
    config, source = source_of(tmp_path)
    with pytest.raises(ModelLoadError, match=r"model.safetensors: layers\.0\.mlp\.down_proj has no scales"):
        Decoder(config, source)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes', supported: gptq, awq, fp8"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3, supported: 4, 8"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}}}, "dynamic is 'a choice per layer'"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "version is 'gemv', supported: gemm"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point is False"),
        (compressed("marlin-24"), "format is 'marlin-24', supported: float-quantized"),
        (compressed("pack-quantized", **{**INT4, "symmetric": False}), "symmetric is False"),
        (compressed("float-quantized", num_bits=4, type="float"), "weights is 'float of 4 bits'"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "config_groups is '0 groups'"),
    ],
)
def test_other_variants_are_refused_by_name(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        scheme_of_checkpoint({"quantization_config": config})
    assert said in str(refused.value)
    assert "use an unquantised version of the model" in str(refused.value)


def test_plain_checkpoints_have_no_scheme() -> None:
    assert scheme_of_checkpoint({}) is None
