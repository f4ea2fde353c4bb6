"""The CPU backend: library calls only, few of them per layer, float32 first."""

from .attention import paged_attention
from .elementwise import add_rms_norm, gelu_tanh_mul, rms_norm, rope_, silu_mul, write_kv
from .linear import prepare_linear
from .sampling import gumbel_noise, sample

__all__ = [
    "add_rms_norm",
    "gelu_tanh_mul",
    "gumbel_noise",
    "paged_attention",
    "prepare_linear",
    "rms_norm",
    "rope_",
    "sample",
    "silu_mul",
    "write_kv",
]
