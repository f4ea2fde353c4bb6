"""Logits of every family equal transformers', however the prompt is cut, through scattered KV blocks."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from tests.models.harness import (
    SIZES,
    PagedRun,
    expected_logits,
    load,
    logits_in_chunks,
    random_ids,
    random_model,
    save,
)

from carousel.models.decoder import Decoder
from carousel.models.errors import UnsupportedModel
from carousel.models.families import decoder_config
from carousel.models.weights import DictSource, open_safetensors

LONG_FACTORS = {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.5, 3.0, 8.0]}


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **parameters}}


GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 12, "sliding_window": 10, "num_hidden_layers": 4}

CASES: dict[str, tuple[type[tf.PretrainedConfig], dict[str, Any]]] = {
    "llama": (tf.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-mha-biases-head-dim": (
        tf.LlamaConfig,
        {"num_key_value_heads": 4, "head_dim": 12, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-mqa": (tf.LlamaConfig, {"num_key_value_heads": 1}),
    "rope-linear": (tf.LlamaConfig, rope("linear", factor=4.0)),
    "rope-dynamic": (tf.LlamaConfig, rope("dynamic", factor=4.0)),
    "rope-yarn": (tf.LlamaConfig, rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "rope-yarn-mscale": (
        tf.LlamaConfig,
        rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.7,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    "rope-llama3": (
        tf.LlamaConfig,
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "mistral-window": (tf.MistralConfig, {"sliding_window": 12}),
    "mistral-no-window": (tf.MistralConfig, {"sliding_window": None, "head_dim": 16}),
    "qwen2": (tf.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-window-layers": (tf.Qwen2Config, {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": (tf.Qwen3Config, {"head_dim": 16}),
    "qwen3-bias-window": (
        tf.Qwen3Config,
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma2": (tf.Gemma2Config, GEMMA | {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 3.0}),
    "gemma3": (tf.Gemma3TextConfig, GEMMA | {"sliding_window_pattern": 3, "final_logit_softcapping": 4.0}),
    "gemma3-ropes": (
        tf.Gemma3TextConfig,
        GEMMA
        | {
            "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "phi3": (tf.Phi3Config, {"sliding_window": 14}),
    "phi3-longrope-short": (
        tf.Phi3Config,
        {"original_max_position_embeddings": 64, **rope("longrope", partial_rotary_factor=0.75, **LONG_FACTORS)},
    ),
    "phi3-longrope-long": (
        tf.Phi3Config,
        {"original_max_position_embeddings": 32, **rope("longrope", partial_rotary_factor=0.75, **LONG_FACTORS)},
    ),
    "smollm3": (tf.SmolLM3Config, {"num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "smollm3-window": (
        tf.SmolLM3Config,
        {"no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 11},
    ),
    "granite": (
        tf.GraniteConfig,
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 4.0,
            "tie_word_embeddings": True,
        },
    ),
}
# The served length decides which of longrope's factors are used; these prompts are of 50 tokens.
SERVED = {"phi3-longrope-short": 60, "phi3-longrope-long": 256}


def make(name: str, directory: Path, **changes: Any) -> tuple[tf.PreTrainedModel, Path]:
    kind, own = CASES[name]
    model = random_model(kind(**(SIZES | own)))
    return model, save(model, directory, **changes)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    model, directory = make(name, tmp_path)
    ids = random_ids(50)
    expected = expected_logits(model, ids)
    assert expected.std() > 0.1  # not a model that says the same of everything
    decoder = load(directory, max_model_len=SERVED.get(name))
    for sizes in ([len(ids)], [1, 17, 3, 20], [1]):
        torch.testing.assert_close(logits_in_chunks(decoder, ids, sizes), expected, atol=1e-4, rtol=1e-4)


def test_a_mixed_batch_equals_each_sequence_alone(tmp_path: Path) -> None:
    _, directory = make("gemma3", tmp_path)
    decoder = load(directory)
    prompts = [random_ids(n, seed=n) for n in (30, 5, 21)]
    alone = [logits_in_chunks(decoder, ids, [len(ids)]) for ids in prompts]
    run = PagedRun(decoder, sequences=3)
    run.step({0: prompts[0][:29], 1: prompts[1][:2]}, rows=[])
    logits = run.step({2: prompts[2], 1: prompts[1][2:], 0: prompts[0][29:]})
    # Decodes come first, then in the order given.
    torch.testing.assert_close(logits[0], alone[0][29], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[1:22], alone[2], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(logits[22:], alone[1][2:], atol=1e-4, rtol=1e-4)


def test_only_the_rows_asked_for_are_computed_and_none_is_allowed(tmp_path: Path) -> None:
    model, directory = make("llama", tmp_path)
    ids = random_ids(20)
    run = PagedRun(load(directory))
    assert run.step({0: ids[:12]}, rows=[]).shape == (0, SIZES["vocab_size"])
    expected = expected_logits(model, ids)
    torch.testing.assert_close(run.step({0: ids[12:]}, rows=[7, 2]), expected[[19, 14]], atol=1e-4, rtol=1e-4)


def test_rope_tables_grow_with_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carousel.models.decoder._FIRST_ROPE_ROWS", 16)
    model, directory = make("rope-llama3", tmp_path)
    ids = random_ids(100)
    logits = logits_in_chunks(load(directory), ids, [10, 30, 60])
    torch.testing.assert_close(logits, expected_logits(model, ids), atol=1e-4, rtol=1e-4)


def test_dynamic_rope_beyond_the_original_length_uses_the_base_of_the_served_length(tmp_path: Path) -> None:
    """transformers re-bases by the running length, so the two agree when the prompt has exactly the served length."""
    model, directory = make("rope-dynamic", tmp_path)
    model.config.max_position_embeddings = 40
    model.model.rotary_emb.max_seq_len_cached = model.model.rotary_emb.original_max_seq_len = 40
    save(model, directory)
    ids = random_ids(50)
    decoder = load(directory, max_model_len=50)
    torch.testing.assert_close(logits_in_chunks(decoder, ids, [9]), expected_logits(model, ids), atol=1e-4, rtol=1e-4)
    assert load(directory).max_model_len == 40


OLD_SPELLING: dict[str, dict[str, Any]] = {
    "rope-linear": {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "rope-yarn": {
        "rope_theta": 1000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    },
    "rope-llama3": {
        "rope_theta": 1000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 16,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    },
    "gemma3-ropes": {
        "rope_theta": 5000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "phi3-longrope-long": {
        "rope_theta": 1000.0,
        "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "su", **LONG_FACTORS},
    },
}


@pytest.mark.parametrize("name", OLD_SPELLING)
def test_the_old_spelling_of_rope_means_the_same(name: str, tmp_path: Path) -> None:
    kind, own = CASES[name]
    new = json.loads(kind(**(SIZES | own)).to_json_string())
    old = {key: value for key, value in new.items() if key != "rope_parameters"} | OLD_SPELLING[name]
    assert decoder_config(old) == decoder_config(new)


def test_a_config_may_leave_out_its_familys_defaults() -> None:
    """As Gemma 3's text_config on the hub does: only what differs from the config class is written."""
    written = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    config = decoder_config({"model_type": "gemma3", "text_config": written})
    full = tf.Gemma3TextConfig(**written)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == full.vocab_size
    assert config.tie_word_embeddings
    assert [w is None for w in config.sliding_windows] == [t == "full_attention" for t in full.layer_types]
    local, full_rope = config.ropes[0], config.ropes[5]
    assert local is not None
    assert (local.kind, local.theta) == ("default", 10_000.0)
    assert full_rope is not None
    assert (full_rope.kind, full_rope.factor, full_rope.theta) == ("linear", 8.0, 1e6)


@pytest.mark.parametrize(
    "kind",
    [
        *(tf.LlamaConfig, tf.MistralConfig, tf.Qwen2Config, tf.Qwen3Config, tf.Gemma2Config),
        *(tf.Gemma3TextConfig, tf.Phi3Config, tf.SmolLM3Config, tf.GraniteConfig),
    ],
)
def test_family_defaults_are_the_config_classes(kind: type[tf.PretrainedConfig]) -> None:
    bare = decoder_config({"model_type": kind.model_type})
    full = decoder_config(json.loads(kind().to_json_string()))
    assert bare == full


def test_the_text_part_of_a_gemma3_with_vision(tmp_path: Path) -> None:
    """Its tensors have a longer prefix, and the vision tower's are not wanted."""
    model, directory = make("gemma3", tmp_path)
    tensors = {name.replace("model.", "language_model.model.", 1): t for name, t in model.state_dict().items()}
    tensors = {name: t for name, t in tensors.items() if name != "lm_head.weight"}
    tensors["vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.weight"] = torch.ones(2)
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"] = torch.ones(2)
    text = json.loads((directory / "config.json").read_text())
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    decoder = Decoder(decoder_config(outer), DictSource(tensors))
    ids = random_ids(30)
    torch.testing.assert_close(logits_in_chunks(decoder, ids, [30]), expected_logits(model, ids), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, "Qwen3MoeForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"], "model_type": "llama"}, "SequenceClassification"),
        ({"model_type": "mamba"}, "mamba"),
        ({}, "None"),
    ],
)
def test_an_unsupported_architecture_is_refused_by_name(config: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedModel, match=name) as refused:
        decoder_config(config)
    assert {"LlamaForCausalLM", "Gemma3ForCausalLM", "GraniteForCausalLM"} < set(refused.value.supported)
    assert "Qwen3ForCausalLM" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor"),
        ({"hidden_act": "relu"}, "relu"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
    ],
)
def test_a_setting_that_the_decoder_does_not_know_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder_config({"model_type": "llama"} | SIZES | change)


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    model, directory = make("qwen3", tmp_path)
    ids = random_ids(20)
    decoder = load(directory, dtype=torch.bfloat16)
    logits = logits_in_chunks(decoder, ids, [7])
    assert logits.dtype == torch.float32
    assert decoder.allocate_kv_cache(2)[0][0].dtype == torch.bfloat16
    expected = expected_logits(model, ids)
    assert (logits - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_sizes_that_others_plan_memory_by(tmp_path: Path) -> None:
    _, directory = make("llama", tmp_path)
    decoder = load(directory)
    cache = decoder.allocate_kv_cache(5)
    assert len(cache) == 3
    assert all(tensor.shape == (5, 16, 2, 8) and not tensor.any() for pair in cache for tensor in pair)
    assert decoder.kv_bytes_per_token * 16 * 5 == sum(tensor.nbytes for pair in cache for tensor in pair)
    source = open_safetensors(directory)
    assert decoder.weight_bytes == 4 * sum(prod(shape) for shape in source.shapes().values())
