"""GGUF: tensor types equal the gguf package's, and files of every architecture give transformers' logits."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers as tf
from tests.models.gguf_files import QUANT, letters, write, write_model
from tests.models.harness import SIZES, expected_logits, logits_in_chunks, random_ids, random_model

from carousel.models.dequantize import dequantize_into, tensor_bytes
from carousel.models.errors import ModelLoadError, UnsupportedModel
from carousel.models.gguf import GGUFSource
from carousel.models.loader import load_model

BLOCK_TYPES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "TQ1_0"]
HALVES = {"Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2]}
HALVES |= {"Q6_K": [208], "TQ1_0": [52]}


def random_blocks(name: str, rows: int, columns: int) -> np.ndarray:
    """Random bytes, but for the float16 scales, which would be infinite or NaN now and then."""
    elements, size = gguf.GGML_QUANT_SIZES[QUANT[name]]
    generator = np.random.default_rng(5)
    blocks = generator.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for at in HALVES.get(name, [0]):
        scales = generator.uniform(-2, 2, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_tensor_types_equal_the_gguf_packages(name: str) -> None:
    blocks = random_blocks(name, 37, 512)
    expected = torch.from_numpy(gguf.dequantize(blocks, QUANT[name]))
    data, kind = torch.from_numpy(blocks).flatten(), QUANT[name].value
    assert tensor_bytes(kind, 37 * 512) == blocks.size
    out = torch.empty(37, 512)
    dequantize_into(data, kind, out)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    scaled = torch.empty(37, 512, dtype=torch.bfloat16)
    dequantize_into(data, kind, scaled, scale=0.5, offset=1.0)
    torch.testing.assert_close(scaled, (expected * 0.5 + 1).bfloat16(), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("name", ["Q8_0", "F16"])
def test_large_tensors_are_split_between_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carousel.models.dequantize._PARALLEL_ELEMENTS", 1000)
    monkeypatch.setattr("carousel.models.dequantize.os.cpu_count", lambda: 3)
    values = np.random.default_rng(1).normal(size=(50, 64)).astype(np.float32)
    data = gguf.quantize(values, QUANT[name])
    out = torch.empty(50, 64)
    dequantize_into(torch.from_numpy(data.view(np.uint8)).flatten(), QUANT[name].value, out)
    torch.testing.assert_close(out, torch.from_numpy(gguf.dequantize(data, QUANT[name])))


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 10, "num_hidden_layers": 7}
ARCHITECTURES: dict[str, tuple[type[tf.PretrainedConfig], dict[str, Any]]] = {
    "llama": (tf.LlamaConfig, {"attention_bias": False}),
    "qwen2": (tf.Qwen2Config, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "qwen3": (tf.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": (tf.Gemma2Config, GEMMA | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0}),
    "gemma3": (tf.Gemma3TextConfig, GEMMA),
    "phi3": (
        tf.Phi3Config,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "granite": (
        tf.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.25,
            "attention_multiplier": 0.125,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": (tf.SmolLM3Config, {"num_hidden_layers": 4}),
}


def tiny(architecture: str, **changes: Any) -> tf.PreTrainedModel:
    kind, own = ARCHITECTURES[architecture]
    return random_model(kind(**(SIZES | own | changes)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_equal_transformers(architecture: str, tmp_path: Path) -> None:
    model = tiny(architecture)
    loaded = load_model(write_model(tmp_path / "tiny.gguf", model, architecture))
    assert loaded.architecture == type(model).__name__
    ids = random_ids(40)
    logits = logits_in_chunks(loaded.decoder, ids, [11, 1])
    torch.testing.assert_close(logits, expected_logits(model, ids), atol=1e-4, rtol=1e-4)
    assert loaded.max_model_len == SIZES["max_position_embeddings"]
    assert loaded.tokenizer.eos_ids == {2}


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda scaling: str(scaling["rope_type"]),
)
def test_rope_scaling_of_the_metadata(scaling: dict[str, Any], tmp_path: Path) -> None:
    model = tiny("qwen2", rope_parameters=scaling | {"rope_theta": 1000.0})
    decoder = load_model(write_model(tmp_path / "tiny.gguf", model, "qwen2")).decoder
    ids = random_ids(40)
    torch.testing.assert_close(logits_in_chunks(decoder, ids, [40]), expected_logits(model, ids), atol=1e-4, rtol=1e-4)


def test_rope_factors_stored_as_tensors(tmp_path: Path) -> None:
    """Llama 3's scaling is stored as a divisor for each frequency, longrope's as two lists of them."""
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    model = tiny("llama", rope_parameters={"rope_type": "llama3", "rope_theta": 1000.0, **llama3})
    plain = 1000.0 ** -(torch.arange(0, 8, 2) / 8)
    divisors = plain / model.model.rotary_emb.inv_freq
    ids = random_ids(40)
    path = write_model(tmp_path / "a.gguf", model, "llama", extra_tensors={"rope_freqs.weight": divisors})
    logits = logits_in_chunks(load_model(path).decoder, ids, [40])
    torch.testing.assert_close(logits, expected_logits(model, ids), atol=1e-4, rtol=1e-4)

    long, short = [1.5, 3.0, 8.0], [1.0, 1.1, 1.3]
    rope = {"rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75}
    model = tiny(
        "phi3",
        original_max_position_embeddings=32,
        rope_parameters=rope | {"long_factor": long, "short_factor": short},
    )
    path = write_model(
        tmp_path / "b.gguf",
        model,
        "phi3",
        extra={"phi3.rope.scaling.attn_factor": float(model.model.rotary_emb.attention_scaling)},
        extra_tensors={
            "rope_factors_long.weight": torch.tensor(long),
            "rope_factors_short.weight": torch.tensor(short),
        },
    )
    logits = logits_in_chunks(load_model(path).decoder, ids, [40])
    torch.testing.assert_close(logits, expected_logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q8_0", "Q4_1"])
def test_quantised_files_compute_with_the_dequantised_weights(quant: str, tmp_path: Path) -> None:
    model = tiny("llama", intermediate_size=64)
    path = write_model(tmp_path / "tiny.gguf", model, "llama", quant=QUANT[quant])
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # a head's rows move whole, so their order does not matter to the quantiser
                rounded = gguf.dequantize(gguf.quantize(parameter.numpy(), QUANT[quant]), QUANT[quant])
                parameter.copy_(torch.from_numpy(rounded))
    ids = random_ids(20)
    logits = logits_in_chunks(load_model(path).decoder, ids, [20])
    torch.testing.assert_close(logits, expected_logits(model, ids), atol=1e-4, rtol=1e-4)


def test_a_split_file_loads_from_any_part_and_from_its_directory(tmp_path: Path) -> None:
    model = tiny("llama")
    write_model(tmp_path / "tiny.gguf", model, "llama", shards=9)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    (tmp_path / "mmproj-tiny.gguf").write_bytes(b"of a vision model")
    ids = random_ids(10)
    for path in (tmp_path, parts[0], parts[-1]):
        logits = logits_in_chunks(load_model(path).decoder, ids, [10])
        torch.testing.assert_close(logits, expected_logits(model, ids), atol=1e-4, rtol=1e-4)
    parts[1].unlink()
    with pytest.raises(ModelLoadError, match=rf"{parts[1].name}.*finish the download"):
        load_model(parts[0])


def test_metadata_reads_as_the_gguf_packages_reader_does(tmp_path: Path) -> None:
    metadata: dict[str, Any] = letters(20) | {"llama.context_length": 7, "general.name": "zürich", "a.flag": True}
    metadata |= {"a.ratio": 0.1, "a.list": [1, -2, 3], "a.floats": [0.5, 1.5], "a.words": ["x", "", "y z"]}
    path = write(tmp_path / "a.gguf", "llama", metadata, {"token_embd.weight": np.ones((20, 32), np.float32)})
    ours = GGUFSource(path).metadata
    theirs = {key: field.contents() for key, field in gguf.GGUFReader(path).fields.items()}
    assert ours == {key: value for key, value in theirs.items() if not key.startswith("GGUF.")}


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "mamba", letters(20), {"token_embd.weight": np.ones((20, 32), np.float32)})
    with pytest.raises(UnsupportedModel, match=r"mamba \(GGUF\).*LlamaForCausalLM"):
        load_model(path)


def test_a_file_that_is_no_whole_language_model_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", "llama", letters(20), {"v.patch_embd.weight": np.ones((20, 32), np.float32)})
    with pytest.raises(ModelLoadError, match=r"a\.gguf: token_embd\.weight, .* is missing"):
        load_model(path)


def test_damaged_files_are_refused_with_what_is_wrong(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole.gguf", tiny("llama"), "llama").read_bytes()
    path = tmp_path / "bad.gguf"
    cases = {
        "not a GGUF file": b"PK\x03\x04" + whole[4:],
        "truncated: has": whole[:-100],
        "header is damaged or truncated": whole[:300],
        "GGUF version 9": whole[:4] + struct.pack("<I", 9) + whole[8:],
    }
    for message, data in cases.items():
        path.write_bytes(data)
        with pytest.raises(ModelLoadError, match=rf"bad\.gguf.*{message}"):
            load_model(path)


def test_a_file_without_a_needed_tensor_or_with_one_too_many_is_refused(tmp_path: Path) -> None:
    model = tiny("llama")
    path = write_model(tmp_path / "a.gguf", model, "llama", extra_tensors={"blk.1.attn_sinks.weight": torch.ones(4)})
    with pytest.raises(ModelLoadError, match=r"a\.gguf: 1 unexpected tensors \(layers\.1\.attn_sinks\.weight\)"):
        load_model(path)
    model.config.num_hidden_layers = 4
    with pytest.raises(ModelLoadError, match=r"tensor layers\.3\.input_layernorm\.weight is missing"):
        load_model(write_model(tmp_path / "b.gguf", tiny("llama"), "llama", extra={"llama.block_count": 4}))
