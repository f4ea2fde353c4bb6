"""Writes tiny GGUF files as llama.cpp's converter would, from transformers models and plain vocabularies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

QUANT = gguf.GGMLQuantizationType
_PERMUTED = {"llama", "granite", "smollm3"}


def _arch_key(architecture: str) -> gguf.MODEL_ARCH:
    return next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)


def _side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """The converter's order of a head's rows: 0, n/2, 1, n/2 + 1, ..."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def model_tensors(model: transformers.PreTrainedModel, architecture: str) -> dict[str, np.ndarray]:
    config = model.config
    names = gguf.get_tensor_name_map(_arch_key(architecture), config.num_hidden_layers)
    result = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        mapped = names.get_name(stem)
        assert mapped is not None, name
        values = tensor.numpy()
        if architecture in _PERMUTED and ".q_proj." in name:
            values = _side_by_side(values, config.num_attention_heads)
        if architecture in _PERMUTED and ".k_proj." in name:
            values = _side_by_side(values, config.num_key_value_heads)
        if architecture.startswith("gemma") and "norm" in name:
            values = values + 1
        result[f"{mapped}.{suffix}"] = values
    return result


def model_metadata(model: transformers.PreTrainedModel, architecture: str) -> dict[str, Any]:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    metadata = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    }
    if rope["rope_type"] in ("linear", "yarn"):
        metadata |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
    if "original_max_position_embeddings" in rope:
        metadata["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if architecture.startswith("gemma"):
        metadata["attention.sliding_window"] = config.sliding_window
    optional = {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    for own, key in optional.items():
        if getattr(config, own, None) is not None:
            metadata[key] = float(getattr(config, own))
    return {f"{architecture}.{key}": value for key, value in metadata.items()}


def letters(size: int = 128) -> dict[str, Any]:
    """A SentencePiece vocabulary without any sense: special tokens, then one piece a character."""
    tokens = ["<unk>", "<s>", "</s>", *(chr(0x4E00 + i) for i in range(size - 3))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(i) for i in range(size)],
        "tokenizer.ggml.token_type": [2, 3, 3, *[1] * (size - 3)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def write(
    path: Path,
    architecture: str,
    metadata: dict[str, Any],
    tensors: dict[str, np.ndarray],
    quant: gguf.GGMLQuantizationType = QUANT.F32,
    shards: int = 0,
) -> Path:
    """Matrices are quantised to ``quant``, vectors stay float32. ``shards``: tensors per file of a split one."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=shards)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, values in tensors.items():
        kind = quant if values.ndim > 1 and not name.startswith("rope_") else QUANT.F32
        data = values.astype(np.float32) if kind == QUANT.F32 else gguf.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_model(
    path: Path,
    model: transformers.PreTrainedModel,
    architecture: str,
    *,
    quant: gguf.GGMLQuantizationType = QUANT.F32,
    extra: dict[str, Any] | None = None,
    extra_tensors: dict[str, torch.Tensor] | None = None,
    shards: int = 0,
) -> Path:
    metadata = model_metadata(model, architecture) | letters(model.config.vocab_size) | (extra or {})
    tensors = model_tensors(model, architecture)
    tensors |= {name: tensor.numpy() for name, tensor in (extra_tensors or {}).items()}
    return write(path, architecture, metadata, tensors, quant, shards)
