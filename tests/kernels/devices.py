"""Runs operators where Triton's kernels run: on the GPU if there is one, otherwise in the interpreter, on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def moved(value: Any, device: torch.device = DEVICE) -> Any:
    """Tensors, also those of tuples and dataclasses, on the device; strides stay as they are if they can."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: moved(getattr(value, field.name), device) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def on_device(call: Callable[..., Any], *arguments: Any) -> Any:
    """The call's result, back on the CPU."""
    return moved(call(*moved(arguments)), torch.device("cpu"))


@contextmanager
def products_by_row() -> Iterator[None]:
    """Have the interpreter multiply as a GPU does: a row's products are added in the same order wherever it stands in
    the tile. In numpy's matrix products that depends on its place."""
    if DEVICE.type == "cuda":
        yield
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
        product = np.einsum("mk,kn->mn", a.data.astype(acc.data.dtype), b.data.astype(acc.data.dtype))
        return TensorHandle(product + acc.data, acc.dtype.scalar)

    with patch.object(InterpreterBuilder, "create_dot", create_dot):
        yield
