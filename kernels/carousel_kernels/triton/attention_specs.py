"""The variants of the attention kernels that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from . import config
from .attention_decode import NATIVE_FP8, PLAIN, UNPACKED_FP8, combine_kernel, decode_kernel, plan_kernel
from .attention_prefill import prefill_kernel
from .attention_uniform import fold_kernel, uniform_kernel
from .config import AttentionConfig, next_power_of_2
from .registry import Spec, Target

__all__ = ["attention_specs"]

_TRITON_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_NUMBERS = {"scale": "fp32", "softcap": "fp32", "k_scale": "fp32", "v_scale": "fp32", "window": "i32"}
_STRIDES = ("qt", "qh", "kb", "kt", "kh", "vb", "vt", "vh", "table")
_FP8 = torch.float8_e4m3fn
_BF16 = torch.bfloat16

# Type of queries, type of the cache, head size, query heads per KV head, soft-cap + window + sinks.
_VARIANTS: tuple[tuple[torch.dtype, torch.dtype, int, int, bool], ...] = (
    (_BF16, _BF16, 64, 4, False),
    (_BF16, _BF16, 80, 1, False),
    (_BF16, _BF16, 96, 8, False),
    (_BF16, _BF16, 128, 4, False),
    (_BF16, _BF16, 128, 4, True),
    (_BF16, _BF16, 256, 2, False),
    (_BF16, _BF16, 256, 2, True),
    (torch.float16, torch.float16, 128, 4, False),
    (torch.float32, torch.float32, 128, 4, False),
    (_BF16, _FP8, 64, 8, True),
    (_BF16, _FP8, 128, 4, False),
    (_BF16, _FP8, 256, 2, True),
)
_UNIFORM = ((_BF16, _BF16, 128, 4, False), (_BF16, _BF16, 128, 4, True), (_BF16, _BF16, 256, 2, False))
_WIDE_DECODE = (_BF16, _BF16, 128, 24, False)  # more query heads than one tile of 16


def attention_specs(target: Target) -> Iterator[Spec]:
    """Every variant on one target, as ``attention`` would launch it there."""
    for variant in (*_VARIANTS, _WIDE_DECODE):
        yield _decode(target, *variant)
    for variant in _VARIANTS:
        yield _prefill(target, *variant)
    for variant in _UNIFORM:
        yield _uniform(target, *variant)
        yield _fold(*variant)
    for window in (False, True):
        yield _plan(window)
    for dim, sinks in ((64, False), (128, False), (128, True), (256, False)):
        yield _combine(dim, sinks)


def _label(query: torch.dtype, cache: torch.dtype, dim: int, group: int, features: bool) -> str:
    types = _TRITON_TYPES[query] + ("/fp8" if cache == _FP8 else "")
    return f"{types} D{dim} G{group}" + (" cap+window+sinks" if features else "")


def _arguments(
    target: Target, query: torch.dtype, cache: torch.dtype, features: bool, pointers: dict[str, str]
) -> tuple[dict[str, str], dict[str, object], tuple[str, ...]]:
    """Signature, compile-time arguments and aligned arguments that decode and prefill share."""
    kind = _TRITON_TYPES.get(cache, "fp8e4nv" if target.fp8 else "u8")
    signature = {"q": f"*{_TRITON_TYPES[query]}", "k_cache": f"*{kind}", "v_cache": f"*{kind}"}
    signature |= {"out": f"*{_TRITON_TYPES[query]}", "context_lens": "*i32", "block_tables": "*i32"} | pointers
    constexprs: dict[str, object] = {"SOFTCAP": features, "WINDOW": features, "SINKS": features}
    if features:
        signature["sinks"] = f"*{_TRITON_TYPES[query]}"
    else:
        constexprs["sinks"] = None
    constexprs["FP8"] = PLAIN if cache != _FP8 else NATIVE_FP8 if target.fp8 else UNPACKED_FP8
    strides = {f"stride_{name}": "i32" for name in _STRIDES}
    aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    aligned += tuple(name for name in strides if name != "stride_table")  # a table's width is any
    return signature | _NUMBERS | strides, constexprs, aligned


def _sizes(chosen: AttentionConfig, dim: int, group: int) -> dict[str, object]:
    return {
        "NUM_HEADS": 8 * group, "GROUP": group, "DIM": dim, "BLOCK_M": chosen.block_m,
        "BLOCK_D": max(next_power_of_2(dim), 16), "BLOCK_N": chosen.block_n,
    }  # fmt: skip


def _decode(
    target: Target, query: torch.dtype, cache: torch.dtype, dim: int, group: int, features: bool
) -> Spec:  # fmt: skip
    chosen = config.decode_config(target, cache, dim, group)
    pointers = {"partial": "*fp32", "partial_lse": "*fp32", "items": "*i32"}
    signature, constexprs, aligned = _arguments(target, query, cache, features, pointers)
    return Spec(
        decode_kernel, _label(query, cache, dim, group, features), signature,
        constexprs | _sizes(chosen, dim, group), chosen.num_warps, chosen.num_stages, decode=True, aligned=aligned,
    )  # fmt: skip


def _prefill(target: Target, query: torch.dtype, cache: torch.dtype, dim: int, group: int, features: bool) -> Spec:
    chosen = config.prefill_config(target, cache, dim, group)
    signature, constexprs, aligned = _arguments(target, query, cache, features, {"query_start": "*i32"})
    signature |= {"num_sequences": "i32", "first_sequence": "i32"}
    constexprs |= {"HEADS": min(group, chosen.block_m)}
    return Spec(
        prefill_kernel, _label(query, cache, dim, group, features), signature,
        constexprs | _sizes(chosen, dim, group), chosen.num_warps, chosen.num_stages, aligned=aligned,
    )  # fmt: skip


def _uniform(target: Target, query: torch.dtype, cache: torch.dtype, dim: int, group: int, features: bool) -> Spec:
    chosen = config.uniform_config(target, cache, dim)
    pointers = {"query_start": "*i32", "partial": "*fp32", "partial_sums": "*fp32"}
    signature, constexprs, aligned = _arguments(target, query, cache, features, pointers)
    signature |= {"num_sequences": "i32", "first_sequence": "i32", "apart": "i32"}
    constexprs |= {"HEADS": min(group, chosen.block_m), "SPLIT": config.DETERMINISTIC_SPLIT}
    return Spec(
        uniform_kernel, _label(query, cache, dim, group, features), signature,
        constexprs | _sizes(chosen, dim, group), chosen.num_warps, chosen.num_stages, decode=True, aligned=aligned,
    )  # fmt: skip


def _fold(query: torch.dtype, cache: torch.dtype, dim: int, group: int, features: bool) -> Spec:
    signature = {"partial": "*fp32", "partial_sums": "*fp32", "out": f"*{_TRITON_TYPES[query]}", "context_lens": "*i32"}
    signature |= {"splits": "i32", "v_scale": "fp32", "window": "i32"}
    constexprs: dict[str, object] = {
        "NUM_HEADS": 8 * group, "DIM": dim, "BLOCK_D": dim, "BLOCK_N": 64, "SPLIT": config.DETERMINISTIC_SPLIT,
        "FP8": PLAIN, "WINDOW": features, "SINKS": features,
    }  # fmt: skip
    if features:
        signature["sinks"] = f"*{_TRITON_TYPES[query]}"
    else:
        constexprs["sinks"] = None
    return Spec(fold_kernel, _label(query, cache, dim, group, features), signature, constexprs, 1, 2, decode=True)


def _plan(window: bool) -> Spec:
    signature = {"context_lens": "*i32", "items": "*i32", "offsets": "*i32"}
    signature |= {"num_sequences": "i32", "capacity": "i32", "max_items": "i32", "window": "i32"}
    constexprs = {"SHORTEST": 2, "BLOCK_N": 64, "WINDOW": window, "BLOCK_S": 1024}
    label = "splits by load" + (" window" if window else "")
    return Spec(plan_kernel, label, signature, constexprs, 4, 2, decode=True, aligned=("context_lens", "items"))


def _combine(dim: int, sinks: bool) -> Spec:
    signature = {"partial": "*fp32", "partial_lse": "*fp32", "out": "*bf16", "offsets": "*i32"}
    constexprs: dict[str, object] = {"NUM_HEADS": 32, "DIM": dim, "BLOCK_D": dim, "BLOCK_I": 32, "SINKS": sinks}
    if sinks:
        signature["sinks"] = "*bf16"
    else:
        constexprs["sinks"] = None
    label = f"bf16 D{dim}" + (" sinks" if sinks else "")
    return Spec(combine_kernel, label, signature, constexprs, 4, 2, decode=True, aligned=("out",))
