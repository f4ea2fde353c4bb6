"""A real but tiny model: random weights, two layers, a byte-level vocabulary. Milliseconds per step."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from unittest.mock import patch

import torch
from scripts.soak import tiny as soak
from scripts.soak.tiny import EOS, VOCAB

from carousel.config import Settings
from carousel.engine.engine import Engine
from carousel.models.decoder import Decoder
from carousel.models.families import DecoderConfig, decoder_config
from carousel.models.loader import LoadedModel
from carousel.models.tokenizer import Tokenizer
from carousel.models.weights import DictSource

MAX_LEN = 512


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
}
"""Of the model, as its config.json would have it."""


def _config() -> DecoderConfig:
    return decoder_config(CONFIG)


def _weights(config: DecoderConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.35

    hidden, inner, width = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    tensors = {
        "model.embed_tokens.weight": random(config.vocab_size, hidden),
        "lm_head.weight": random(config.vocab_size, hidden),
        "model.norm.weight": torch.ones(hidden),
    }
    for i in range(config.num_layers):
        layer = {
            "self_attn.q_proj": random(width, hidden),
            "self_attn.k_proj": random(kv_width, hidden),
            "self_attn.v_proj": random(kv_width, hidden),
            "self_attn.o_proj": random(hidden, width),
            "mlp.gate_proj": random(inner, hidden),
            "mlp.up_proj": random(inner, hidden),
            "mlp.down_proj": random(hidden, inner),
            "input_layernorm": torch.ones(hidden),
            "post_attention_layernorm": torch.ones(hidden),
        }
        tensors |= {f"model.layers.{i}.{name}.weight": tensor for name, tensor in layer.items()}
    return tensors


def byte_tokenizer() -> Tokenizer:
    """One token per byte, plus an end-of-text token: multi-byte characters always span tokens."""
    backend, templates = soak.byte_tokenizer(words=False), {"default": soak.TEMPLATE}
    return Tokenizer(backend, special_tokens={"eos_token": "<|end|>"}, templates=templates, eos_ids=[EOS])


@functools.cache
def tiny_model() -> LoadedModel:
    """The same model for all tests of a process."""
    config = _config()
    decoder = Decoder(config, DictSource(_weights(config)))
    return LoadedModel(decoder, byte_tokenizer(), {}, config.architecture, Path("tiny"), MAX_LEN)


def tiny_settings(**changes: object) -> Settings:
    """Settings of a small engine; ``kv_cache_memory`` is 1 MiB unless changed."""
    base = Settings(
        model_name="tiny",
        threads=1,
        max_batch_tokens=64,
        max_batch_sequences=8,
        kv_cache_memory="1MiB",
        target_step_ms=0.0,
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def started_engine(model: LoadedModel | None = None, **changes: object) -> Engine:
    """A running engine on the tiny model, or another. Stop it."""
    engine = Engine(model or tiny_model(), tiny_settings(**changes))
    # A tiny model's blocks are tiny: pools of a few of them, which make preemptions, are below the smallest setting.
    with patch("carousel.config.MIN_KV_CACHE_BYTES", 1):
        engine.start()
    return engine


def kv_memory(num_blocks: int) -> str:
    """The ``kv_cache_memory`` that makes exactly ``num_blocks`` blocks."""
    return f"{num_blocks * 16 * tiny_model().decoder.kv_bytes_per_token}B"
