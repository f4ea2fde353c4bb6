"""Rotary position embeddings: the parameters of each scaling method, and their tables of cosines and sines.

A paged KV cache keeps rotated keys, so the rotation of a position must never change while the cache lives. Two methods
of ``transformers`` pick their frequencies by the length of the running sequence; here they are fixed by the length
that is *served* (``max_model_len``), so that every cached key and every later query agree:

- ``dynamic`` (NTK): within the original length the unscaled frequencies, as ``transformers`` uses there; when a longer
  length is served, the base for that length, for all sequences. Unasked, the original length is served.
- ``longrope``: the short factors when no more than the original length is served, else the long ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

_LISTS = {"short_factor": "short_factor", "long_factor": "long_factor", "divisors": "frequency_divisors"}

KINDS = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """Parameters of one rotary embedding; layers with equal ones share a table.

    ``rotary_dim`` leading dimensions of each head are rotated. ``original_length`` is the pretraining context in
    tokens. ``divisors`` (GGUF only, [rotary_dim / 2]) divide the frequencies that ``kind`` yields.
    """

    rotary_dim: int
    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0
    max_length: int = 0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()

    @property
    def default_length(self) -> int:
        """Tokens of context this embedding is meant for when nothing else is asked."""
        if self.kind == "yarn":
            return max(self.max_length, int(self.original_length * self.factor))
        return self.max_length


def rope_config(parameters: Mapping[str, Any], *, head_dim: int, theta: float, max_length: int) -> RopeConfig:
    """Parse one set of RoPE parameters in either of transformers' spellings (``rope_type`` or ``type``).

    ``theta`` stands in where the parameters give none. ValueError, naming the field, for an unknown method or a
    missing or ill-sized field.
    """
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "su":  # the first name of longrope, still found in Phi-3 files
        kind = "longrope"
    if kind not in KINDS:
        raise ValueError(f"rope_type {kind!r} is not supported; supported: {', '.join(KINDS)}")
    dim = int(head_dim * (parameters.get("partial_rotary_factor") or 1.0))
    if not 0 < dim <= head_dim or dim % 2:
        raise ValueError(f"the rotary embedding turns {dim} dimensions of {head_dim}, allowed: an even part of them")
    original = int(parameters.get("original_max_position_embeddings") or max_length)
    factor = parameters.get("factor")
    if factor is None:
        if kind in ("linear", "dynamic", "llama3"):
            raise ValueError(f"rope_type {kind!r} needs the field 'factor'")
        factor = max_length / original
    lists: dict[str, Any] = {
        field: tuple(float(f) for f in parameters.get(name) or ())
        for field, name in _LISTS.items()
        if kind == "longrope" or field == "divisors"
    }
    for field, values in lists.items():
        if len(values) != dim // 2 and (values or field != "divisors"):
            raise ValueError(f"rope {_LISTS[field]} has {len(values)} entries, expected {dim // 2}")
    optional: dict[str, Any] = {
        name: float(parameters[name])
        for name in (
            *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
            *("low_freq_factor", "high_freq_factor"),
        )
        if parameters.get(name) is not None
    }
    numbers = {"theta": float(parameters.get("rope_theta") or theta), "factor": float(factor), **optional}
    numbers |= {f"{name}[{i}]": value for name, values in lists.items() for i, value in enumerate(values)}
    for name, value in numbers.items():
        if not 0 < value < 1e30 and not (name.startswith("mscale") and value == 0):
            raise ValueError(f"rope {name} is {value}, allowed: a finite number above 0")
    if not 0 < original <= 1 << 31:
        raise ValueError(f"rope original_max_position_embeddings is {original}, allowed: a positive integer")
    return RopeConfig(
        rotary_dim=dim,
        theta=float(parameters.get("rope_theta") or theta),
        kind=kind,
        factor=float(factor),
        original_length=original,
        max_length=max_length,
        truncate=bool(parameters.get("truncate", True)),
        **lists,
        **optional,
    )


def _yarn(config: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Blend interpolated (slow) and kept (fast) frequencies over the dimensions between two numbers of rotations."""
    dim, base = config.rotary_dim, config.theta

    def dimension(rotations: float) -> float:
        return dim * math.log(config.original_length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001
    interpolated = ((torch.arange(dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return inverse / config.factor * interpolated + inverse * (1 - interpolated)


def _llama3(config: RopeConfig, inverse: torch.Tensor) -> torch.Tensor:
    """Divide wavelengths beyond the original context by ``factor``, keep the short ones, blend in between."""
    turns = config.original_length * inverse / (2 * math.pi)
    smooth = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * inverse / config.factor + smooth * inverse


def inverse_frequencies(config: RopeConfig, served_length: int) -> tuple[torch.Tensor, float]:
    """Radians per token, float32 [rotary_dim / 2], and the factor on cosines and sines, for contexts of
    ``served_length`` tokens."""
    dim, base, scale = config.rotary_dim, config.theta, 1.0
    if config.kind == "dynamic" and served_length > config.max_length:
        stretch = config.factor * served_length / config.max_length - (config.factor - 1)
        base *= stretch ** (dim / (dim - 2))
    inverse = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if config.kind == "linear":
        inverse = inverse / config.factor
    elif config.kind == "yarn":
        inverse = _yarn(config, inverse)
        scale = _yarn_attention(config)
    elif config.kind == "llama3":
        inverse = _llama3(config, inverse)
    elif config.kind == "longrope":
        factors = config.long_factor if served_length > config.original_length else config.short_factor
        inverse = inverse / torch.tensor(factors, dtype=torch.float32)
        scale = _longrope_attention(config)
    if config.divisors:
        inverse = inverse / torch.tensor(config.divisors, dtype=torch.float32)
    return inverse, scale


def _yarn_attention(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)


def _longrope_attention(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(config.factor) / math.log(config.original_length))


def cos_sin_table(config: RopeConfig, rows: int, served_length: int) -> torch.Tensor:
    """Float32 [rows, rotary_dim]: for each position the cosines, then the sines, as ``rope_`` takes them."""
    inverse, scale = inverse_frequencies(config, served_length)
    angles = torch.arange(rows, dtype=torch.float32).unsqueeze(1) * inverse
    table = torch.empty(rows, 2 * inverse.shape[0])
    cos, sin = table.chunk(2, dim=1)
    torch.cos(angles, out=cos)
    torch.sin(angles, out=sin)
    return table if scale == 1.0 else table.mul_(scale)
