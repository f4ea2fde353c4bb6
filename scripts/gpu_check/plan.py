"""What the check does at full size and with --tiny, and the names of its stages."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FULL", "STAGES", "TINY", "Plan"]

STAGES = ("kernels", "roofline", "parity", "decode", "graphs", "mixed", "itl", "batching", "load")
"""In the order of what is worth knowing first: the last ones are what a lack of time costs."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of the model and of the loads. Lengths are tokens.

    Attributes:
        config: of a LlamaForCausalLM.
        parity: (prompt lengths, output length).
        decode: (sequences, prompt length, output length) of each run.
        mixed: (tokens of each step, context of its decodes, repetitions).
        load: layers of the model that is written to disk and read from it.
        itl: (streams, their output length, long prompts, their length).
        batching: (requests, seats, prompt length, least and most output length).
        tolerance: how far below the largest logit of transformers a chosen token's may be: what rounding makes of it.
        kernel_seconds: time per case of the roofline.
    """

    config: dict[str, object]
    dtype: str
    max_model_len: int
    parity: tuple[tuple[int, ...], int]
    decode: tuple[tuple[int, int, int], ...]
    mixed: tuple[tuple[int, ...], int, int]
    load: int
    itl: tuple[int, int, int, int]
    batching: tuple[int, int, int, int, int]
    tolerance: float
    kernel_seconds: float


FULL = Plan(
    config={
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    dtype="bfloat16",
    max_model_len=16384,
    parity=((17, 130, 300, 1025), 48),
    decode=((1, 1024, 128), (32, 1024, 128), (128, 512, 128)),
    mixed=((16, 32, 64, 128, 192, 256, 512), 1024, 20),
    load=8,
    itl=(16, 400, 4, 8192),
    batching=(96, 32, 512, 32, 1536),
    tolerance=0.15,
    kernel_seconds=0.15,
)  # fmt: skip
"""Llama 3 8B; the lengths of the last are those of Anyscale's "How continuous batching enables 23x throughput"."""

TINY = Plan(
    config={
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    dtype="float32",
    max_model_len=128,
    parity=((3, 20), 4),
    decode=((2, 4, 4),),
    mixed=((5, 16), 20, 1),
    load=1,
    itl=(2, 8, 1, 24),
    batching=(4, 2, 4, 2, 6),
    tolerance=1e-3,
    kernel_seconds=0.001,
)  # fmt: skip
