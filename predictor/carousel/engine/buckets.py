"""What recorded work has in common: the sizes recorded, the tables that it reads, where padding may write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from carousel.engine.device import Device
from carousel_kernels.layout import BLOCK_SIZE

NUM_SCRATCH_BLOCKS = 4
"""Blocks of a KV pool that belong to nobody: where the rows write that fill a bucket up."""

_STAGES = 2  # steps whose numbers may be on their way: the one in flight, and the one that is being launched


def bucket_sizes(most: int, first: Sequence[int] = (1, 2, 4), step: int = 8) -> list[int]:
    """Sizes that are recorded, ascending: those of ``first``, then at most ``step`` or a quarter apart, up to ``most``.

    Raises:
        ValueError: ``most`` < 1.
    """
    if most < 1:
        raise ValueError(f"most: got {most}, allowed: an integer >= 1")
    sizes = list(first)
    while sizes[-1] < most:
        sizes.append(sizes[-1] // step * step + step)
        if sizes[-1] >= 8 * step:
            step *= 2
    return [size for size in sizes if size < most] + [most]


def scratch_slots(scratch: int, count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Slots int64 [count] in the scratch blocks from ``scratch`` on; from the first one again where they end."""
    return scratch * BLOCK_SIZE + np.arange(count, dtype=np.int64) % (NUM_SCRATCH_BLOCKS * BLOCK_SIZE)


class NumberTable:
    """int64 [sections, size] in one place on the device, which each step overwrites in one transfer.

    Attributes:
        sections: its rows, as views.
    """

    def __init__(self, device: Device, on: torch.device, sections: int, size: int) -> None:
        self._table = torch.zeros((sections, size), dtype=torch.int64, device=on)
        self._staging = [device.staging(sections * size).view(sections, size) for _ in range(_STAGES)]
        self._turn = 0
        self.sections = self._table.unbind()

    def fill(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Have the table hold ``numbers`` for the work that is launched from now on; does not wait."""
        self._turn = (self._turn + 1) % _STAGES
        stage = self._staging[self._turn]
        stage.numpy()[:] = numbers
        self._table.copy_(stage, non_blocking=True)
