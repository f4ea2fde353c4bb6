"""The GPU backend: kernels in Triton, for CUDA and ROCm, and in Triton's interpreter for any device in tests.

What has no kernel of its own is a library call. Kernels launch on torch's current device and stream, make no
synchronisation and allocate only through torch, so that they can be recorded in CUDA graphs.
"""

from __future__ import annotations

from carousel_kernels.reference import (  # PyTorch's own is as fast; the weights are the CPU's
    largest,
    prepare_half_linear,
    prepare_quantized_linear,
)

from .attention import paged_attention
from .elementwise import (
    add_rms_norm,
    gelu_tanh_mul,
    gelu_tanh_mul_quant,
    rms_norm,
    rope_,
    rope_write_kv,
    silu_mul,
    silu_mul_quant,
    write_kv,
)
from .linear import add_lora_, prepare_grouped_linear, prepare_linear, prepare_scaled_linear
from .logprobs import token_logprobs
from .sampling import gumbel_noise, sample

__all__ = [
    "add_lora_",
    "add_rms_norm",
    "gelu_tanh_mul",
    "gelu_tanh_mul_quant",
    "gumbel_noise",
    "largest",
    "paged_attention",
    "prepare_grouped_linear",
    "prepare_half_linear",
    "prepare_linear",
    "prepare_quantized_linear",
    "prepare_scaled_linear",
    "rms_norm",
    "rope_",
    "rope_write_kv",
    "sample",
    "silu_mul",
    "silu_mul_quant",
    "token_logprobs",
    "write_kv",
]
