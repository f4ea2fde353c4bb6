"""What Triton's statistics extension tells of a model: how many requests, how long they waited and computed.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md has the names. Times
are nanoseconds, summed over requests from the start of the server.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from carousel.engine.request import FinishReason
from carousel.engine.timeline import RequestRecord, StepRecord

# in the order of their field numbers in the message
KINDS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
"""What is summed. ``compute_input`` is the prefill, ``compute_infer`` the decode, ``cache_hit`` a cached prefix."""
_UNSUCCESSFUL = (FinishReason.CANCELLED, FinishReason.ERROR)


class RequestStatistics:
    """An engine ``Observer`` that sums. One lock, taken once per step and per request.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._steps = 0
        self._last_ms = 0
        self._sums = {kind: [0, 0] for kind in KINDS}  # count, nanoseconds

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        with self._lock:
            self._steps += 1

    def on_finish(self, request: RequestRecord) -> None:
        outcome = "fail" if request.finish_reason in _UNSUCCESSFUL else "success"
        times: list[tuple[str, float | None]] = [(outcome, request.e2e_s)]
        if outcome == "success":
            times += [
                ("queue", request.queue_s),
                ("compute_input", request.prefill_s),
                ("compute_infer", request.decode_s),
                ("compute_output", 0.0),  # the text is made beside the decode
                ("cache_hit" if request.cached_tokens else "cache_miss", 0.0),
            ]
        with self._lock:
            self._last_ms = int(self._clock() * 1000)
            for kind, seconds in times:
                if seconds is not None:
                    self._sums[kind][0] += 1
                    self._sums[kind][1] += round(seconds * 1e9)

    def answer(self, name: str, version: str) -> dict[str, Any]:
        """The extension's answer for this one model, as JSON has it and as its message is made from."""
        with self._lock:
            sums = {kind: {"count": count, "ns": ns} for kind, (count, ns) in self._sums.items()}
            model = {
                "name": name,
                "version": version,
                "last_inference": self._last_ms,
                "inference_count": sums["success"]["count"],
                "execution_count": self._steps,
                "inference_stats": sums,
                "batch_stats": [],
            }
        return {"model_stats": [model]}
