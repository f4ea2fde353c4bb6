"""Where the time of the engine's steps goes: ``carousel bench --profile``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import carousel_kernels as ck
from carousel.engine.timeline import RequestRecord, StepRecord

FORWARD: Mapping[str, tuple[str, ...]] = {
    "matrix products": ("linear",),
    "attention": ("paged_attention",),
    "RoPE and KV writes": ("rope_write_kv", "rope_", "write_kv"),
    "norms": ("rms_norm", "add_rms_norm"),
    "activations": ("silu_mul", "gelu_tanh_mul", "silu_mul_quant", "gelu_tanh_mul_quant"),
}
"""Parts of a forward pass, and the operators of each; what is left of it is called ``forward, other``."""

Row = tuple[str, float, float]
"""A part's name, its seconds, and its calls in each step."""


@dataclass(slots=True)
class Profile:
    """An engine observer. The model must be loaded within :meth:`watching` for its linear layers to be seen."""

    times: ck.OperatorTimes = field(default_factory=ck.OperatorTimes)
    steps: list[StepRecord] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time every operator until the block ends."""
        with ck.time_operators(self.times):
            yield

    def begin(self) -> None:
        """Forget what was seen so far, such as the warm-up."""
        self.times.reset()
        self.steps.clear()

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        self.steps.append(step)

    def on_finish(self, request: RequestRecord) -> None:
        """Steps say it all."""

    def rows(self) -> list[Row]:
        """The parts of all steps; they sum to the steps' whole time."""
        count = max(1, len(self.steps))
        run_s, sample_s = (sum(getattr(step, name) for step in self.steps) for name in ("run_s", "sample_s"))
        schedule_s, whole_s = (sum(getattr(step, name) for step in self.steps) for name in ("schedule_s", "duration_s"))
        rows: list[Row] = []
        for part, operators in FORWARD.items():
            found = [self.times[name] for name in operators if name in self.times]
            rows.append((part, sum(one.seconds for one in found), sum(one.calls for one in found) / count))
        rows.append(("forward, other", run_s - sum(seconds for _, seconds, _ in rows), 0.0))
        rows.append(("sampling", sample_s, 1.0))
        rows.append(("scheduling", schedule_s, 1.0))
        rows.append(("other", whole_s - run_s - sample_s - schedule_s, 1.0))
        return rows

    def figures(self) -> dict[str, Any]:
        """For the report: seconds, share and calls per step of each part."""
        rows = self.rows()
        whole_s = sum(seconds for _, seconds, _ in rows)
        return {
            "steps": len(self.steps),
            "seconds": whole_s,
            "parts": {
                part: {"seconds": seconds, "share": seconds / whole_s if whole_s else 0.0, "calls_per_step": calls}
                for part, seconds, calls in rows
            },
        }
