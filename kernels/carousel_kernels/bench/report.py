"""Runs the cases and writes the table, as text, JSON and Markdown."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import carousel_kernels as ck

from .cases import TINY, Sizes, cases
from .measure import Timer, copy_bandwidth

__all__ = ["Row", "Table", "measure"]

_COPY_BYTES, _TINY_COPY_BYTES = 2 << 30, 1 << 20


@dataclass(slots=True)
class Row:
    """One case as measured.

    Attributes:
        microseconds: median; gigabytes_per_s and teraflops follow from it.
        share: of the copy bandwidth.
        peers: microseconds of other libraries, or why one failed.
        goal: the share asked for, and whether it was reached; None where nothing is asked.
        error: why the operator failed, or empty.
    """

    operator: str
    shape: str
    num_bytes: int
    flops: int
    microseconds: float = 0.0
    gigabytes_per_s: float = 0.0
    teraflops: float = 0.0
    share: float = 0.0
    peers: dict[str, float | str] = field(default_factory=dict)
    goal: float | None = None
    reached: bool | None = None
    error: str = ""


@dataclass(slots=True)
class Table:
    """All rows, and what they were measured on."""

    device: str
    backend: str
    torch: str
    copy_gigabytes_per_s: float
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def to_markdown(self) -> str:
        head = ["operator", "shape", "MB", "GFLOP", "us", "GB/s", "of copy", "TFLOP/s", "goal", "others, us"]
        copy = f"a copy moves {self.copy_gigabytes_per_s:,.1f} GB/s"
        lines = [
            f"{self.device}, backend {self.backend}, torch {self.torch}; {copy}.",
            "",
            "| " + " | ".join(head) + " |",
            "|" + "---|---|" + "---:|" * (len(head) - 3) + "---|",
        ]
        return "\n".join([*lines, *(_line(row) for row in self.rows)]) + "\n"


def _line(row: Row) -> str:
    if row.error:
        return f"| {row.operator} | {row.shape} | failed: {row.error} |" + " |" * 7
    goal = "" if row.goal is None else f"{row.goal:.2f} {'reached' if row.reached else 'missed'}"
    others = ", ".join(f"{name} {time:,.1f}" if isinstance(time, float) else f"{name} {time}"
                       for name, time in row.peers.items())  # fmt: skip
    return (
        f"| {row.operator} | {row.shape} | {row.num_bytes / 1e6:,.2f} | {row.flops / 1e9:,.2f} | "
        f"{row.microseconds:,.1f} | {row.gigabytes_per_s:,.1f} | {row.share:.2f} | {row.teraflops:,.2f} | {goal} | "
        f"{others} |"
    )


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"


def _reason(error: Exception) -> str:
    """An error on one short line, fit for a table."""
    return " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")[:160]


def measure(
    device: torch.device,
    backend: str,
    *,
    tiny: bool = False,
    only: str = "",
    seconds: float = 0.2,
    progress: Callable[[Row], None] = lambda row: None,
) -> Table:
    """Measure every case whose operator contains ``only``, ``seconds`` each or a little more.

    An operator that fails becomes a row that says so. On a GPU in bfloat16, elsewhere in float32.
    """
    timer = Timer(device, seconds)
    bandwidth = copy_bandwidth(timer, _TINY_COPY_BYTES if tiny else _COPY_BYTES if device.type == "cuda" else 1 << 27)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    units = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    table = Table(device_name(device), backend, torch.__version__, bandwidth / 1e9, [])
    with ck.use_backend(backend), torch.inference_mode():
        for case in cases(TINY if tiny else Sizes(), device, dtype, units):
            if only not in case.operator:
                continue
            row = Row(case.operator, case.shape, case.num_bytes, case.flops, goal=case.goal)
            try:
                elapsed = timer(case.call)
            except Exception as error:  # one operator that cannot run must not hide what the others do
                row.error = _reason(error)
                row.reached = None if row.goal is None else False
            else:
                _fill(row, elapsed, bandwidth)
                for name, call in case.peers.items():
                    try:
                        row.peers[name] = timer(call) * 1e6
                    except Exception as error:  # another library's
                        row.peers[name] = _reason(error)
            table.rows.append(row)
            progress(row)
    return table


def _fill(row: Row, elapsed: float, bandwidth: float) -> None:
    row.microseconds = elapsed * 1e6
    row.gigabytes_per_s = row.num_bytes / elapsed / 1e9
    row.teraflops = row.flops / elapsed / 1e12
    row.share = row.num_bytes / elapsed / bandwidth
    if row.goal is not None:
        row.reached = row.share >= row.goal
