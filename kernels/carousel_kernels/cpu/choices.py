"""What was measured on this CPU, in a form that can be kept for the next process on one like it."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path
from typing import Any

import torch

from . import half, linear, native, quant
from .timing import Choices

__all__ = ["machine", "restore", "saved"]

_FORMAT = 1
_CPU_LINES = ("model name", "flags", "cpu family", "model", "stepping", "CPU part", "CPU implementer", "Features")


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A short name for all that the measurements depend on: the CPU's model and features, PyTorch, our own kernels."""
    try:
        first = cpuinfo.read_text().split("\n\n")[0].splitlines()
    except OSError:
        first = [platform.processor()]
    lines = [line for line in first if line.split(":")[0].strip() in _CPU_LINES] or first
    own = (native.vector_bits(), native.dot_products(), native.ABI_VERSION)
    facts = (_FORMAT, lines, platform.machine(), torch.__version__, *own)
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def saved() -> dict[str, Any]:
    """All measurements of this process, as what JSON can hold."""
    return {
        "linear": sorted([*shape, _name(t), name] for (*shape, t), name in linear.chosen_implementations().items()),
        "quantized": _listed(quant.chosen()),
        "half": _listed(half.chosen()),
    }


def restore(measured: dict[str, Any]) -> None:
    """Take what ``saved`` gave for measured.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is not what ``saved`` gives.
    """
    plain = {(int(n), int(k), _dtype(dtype)): str(name) for n, k, dtype, name in measured["linear"]}
    quantized, halved = _read(measured["quantized"]), _read(measured.get("half", []))
    linear.remember(plain)
    quant.remember(quantized)
    half.remember(halved)


def _listed(chosen: Choices) -> list[list[Any]]:
    return sorted([*key, [list(step) for step in choice]] for key, choice in chosen.items())


def _read(listed: Any) -> Choices:
    return {
        (int(n), int(k), bool(compiled)): tuple((int(rows), str(name)) for rows, name in choice)
        for n, k, compiled, choice in listed
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no type of tensors")
    return dtype
