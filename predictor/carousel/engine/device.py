"""What the engine asks of a device beside tensor operators: copies that do not wait, a place to wait, recorded work.

On the CPU, which is :class:`Device` itself, work is done when its call returns, and a copy is the tensor. The engine is
written for a device that is behind the host, and all of it but :class:`CudaDevice` is tested without one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from carousel.engine.memory import free_memory


class Readback:
    """Tensors on their way to the host."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._tensors = tensors

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The tensors, in host memory, once they are there."""
        return self._tensors


class Device:
    """Where the model runs. See the module. Work runs in the order of the calls."""

    records = False
    """Whether :meth:`record` makes work cheaper to launch."""

    compiles = False
    """Whether operators are compiled at their first use."""

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device

    @staticmethod
    def of(device: torch.device) -> Device:
        """The device's own kind of :class:`Device`."""
        return CudaDevice(device) if device.type == "cuda" else Device(device)

    def bind(self) -> None:
        """Make it the current device of the calling thread."""

    def describe(self) -> str:
        """For the log."""
        return str(self.torch_device)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor, as it is now, on the device; the host goes on at once."""
        return tensor.to(self.torch_device)

    def staging(self, size: int) -> torch.Tensor:
        """An int64 [size] buffer in host memory from which ``copy_(..., non_blocking=True)`` need not wait."""
        return torch.zeros(size, dtype=torch.int64)

    def read(self, *tensors: torch.Tensor) -> Readback:
        """Bring tensors to the host, as they are at this point of the device's work; the host goes on at once."""
        return Readback(tensors)

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record ``work``, which reads and writes tensors that stay where they are.

        Returns:
            What does the work again, and the tensor into which its result then goes.
        """
        result = work()

        def replay() -> None:
            result.copy_(work())

        return replay, result

    def forget_recordings(self) -> None:
        """What was recorded until now is not replayed any more; the next recordings share nothing with it."""

    def free_bytes(self) -> int:
        """Bytes that may still be taken here, those included that an allocator keeps for later."""
        return free_memory(self.torch_device)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        """Do ``work``, wait for it, and say how much memory it took while it ran; 0 where that is not counted."""
        return 0


def explain(error: BaseException) -> str:
    """What ended the engine, in a line: torch adds paragraphs of advice for developers to what a GPU reports."""
    first = str(error).strip().split("\n", 1)[0]
    if isinstance(error, torch.OutOfMemoryError):
        # The first sentence says it; the rest is the allocator's state.
        return f"the device is out of memory: {first.split('. ', 1)[0]}; lower --kv-cache-memory or --max-batch-tokens"
    if isinstance(error, torch.AcceleratorError) or first.startswith(("CUDA error", "HIP error")):
        return f"the device has failed: {first}; only a restart helps"
    return f"{type(error).__name__}: {error}"


class _CudaReadback(Readback):
    __slots__ = ("_event",)

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        pinned = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(pinned, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        super().__init__(tuple(pinned))
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> tuple[torch.Tensor, ...]:
        self._event.synchronize()
        return self._tensors


class CudaDevice(Device):
    """A GPU, or a MIG slice of one. All calls of the engine are on the current stream of the thread that is bound.

    Pinned memory comes from torch's caching allocator, which gives a buffer out again only when the copies that were
    launched from it are done.
    """

    records = True
    compiles = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device if device.index is not None else torch.device("cuda", torch.cuda.current_device()))
        self._pool: Any = None
        self._side: Any = None

    def bind(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def describe(self) -> str:
        properties = torch.cuda.get_device_properties(self.torch_device)
        capability = f"{properties.major}.{properties.minor}"
        size = properties.total_memory / 2**30
        others = torch.cuda.device_count() - 1
        beside = f"; {others} more visible, not used" if others else ""
        return f"{self.torch_device}: {properties.name}, {size:.0f} GiB, compute capability {capability}{beside}"

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def staging(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, pin_memory=True)

    def read(self, *tensors: torch.Tensor) -> Readback:
        return _CudaReadback(tensors)

    def record(self, work: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """As a CUDA graph. All graphs share one memory pool: record the largest first."""
        # One stream for all: what the allocator keeps for a stream, no other gets.
        self._side = self._side or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current, side = torch.cuda.current_stream(), self._side
        side.wait_stream(current)
        with torch.cuda.stream(side):
            work()  # kernels are compiled and libraries initialised outside the recording
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may ask after events meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
            result = work()
        self._pool = graph.pool()
        return graph.replay, result

    def forget_recordings(self) -> None:
        self._pool = None  # a pool whose graphs are gone cannot be recorded into again

    def free_bytes(self) -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return free_memory(self.torch_device)

    def peak_bytes(self, work: Callable[[], object]) -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        gc.collect()
        torch.cuda.empty_cache()
        return peak
