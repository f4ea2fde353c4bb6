"""Safetensors straight to a GPU: read in large pieces by a few threads, and copied while the next pieces are read.

Mapped files would be read one page fault at a time, by one thread, into memory from which the GPU cannot copy by
itself. So a :class:`StagedSource` first collects what the decoder asks for, whose tensors are allocated on the device
already. Then it goes through the files from front to back, in pieces that each lie in a buffer of pinned memory:
readers fill the buffers, copies empty them, and a buffer is filled again when its copy is done. How many there are, and
how large, is fixed: beside them a load takes no memory of the host, however large the model.

What is stored in the type that is wanted goes from the buffer right into its tensor. Everything else, other types,
factors and ranges of columns, goes through a scratch buffer on the device, which has the bandwidth for it. A rank that
wants a range of rows reads no more than that. One that wants a range of columns reads whole rows: the ranges are some
kilobytes wide, disks and read-ahead fetch what lies between anyway, and the other ranks of the pod want it as well, and
find it in the page cache.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .errors import ModelLoadError
from .parallel import Part
from .weights import Extent, SafetensorsSource

__all__ = ["Copies", "CudaCopies", "StagedSource"]

PIECE_BYTES = 16 << 20
"""Read at once, and copied at once: large enough for disks and for PCIe, small enough to keep both busy."""
READERS = 8
"""Threads that read: a file system of many disks, or over a network, wants several requests at a time."""
BUFFERS = READERS + 4
"""Of pinned memory: one per reader, and some on their way to the device."""

_LEAST_PIECE = 1 << 20
_GAP = 1 << 16  # bytes between two tensors that are read along: cheaper than a request of their own


def _nothing() -> None:
    """What waiting for a copy amounts to that was done when its call returned."""


class Copies:
    """Copies from host memory to a device, in order, while the host goes on. Here, on the CPU, they do not wait."""

    def buffer(self, size: int) -> torch.Tensor:
        """Host memory, uint8 [size], from which a copy with ``non_blocking=True`` does not wait."""
        return torch.empty(size, dtype=torch.uint8)

    def begin(self) -> None:
        """What follows comes after all work on the device so far."""

    def run(self, work: Callable[[], None]) -> Callable[[], None]:
        """Launch ``work``, copies and operators on what they bring, after all before it.

        Returns:
            What waits until it is done; may be called in another thread.
        """
        work()
        return _nothing

    def end(self) -> None:
        """Wait for all of it; whatever is launched on the device from now on sees it."""

    def release(self) -> None:
        """Give buffers that nobody holds back to the system."""


class CudaCopies(Copies):
    """On a stream of their own, from pinned memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def begin(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def run(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event(blocking=True)
            done.record(self._stream)
        wait: Callable[[], None] = done.synchronize
        return wait

    def end(self) -> None:
        self._stream.synchronize()

    def release(self) -> None:
        if empty := getattr(torch.accelerator, "empty_host_cache", None):  # not every torch has it
            empty()


@dataclass(eq=False, slots=True)
class _Wanted:
    """``out`` is to become what lies at ``extent``, times ``scale``, plus ``offset``."""

    extent: Extent
    out: torch.Tensor
    scale: float = 1.0
    offset: float = 0.0

    @property
    def as_stored(self) -> bool:
        """Whether it is a matter of copying bytes."""
        same = self.out.dtype == self.extent.dtype and self.extent.part is None
        return same and self.scale == 1.0 and self.offset == 0.0

    @property
    def unit(self) -> int:
        """Bytes that must be in one piece: an element, or a row where a range of columns is wanted."""
        size = self.extent.dtype.itemsize
        return size if self.extent.part is None else size * math.prod(self.extent.shape[1:])

    def land(self, begin: int, end: int, host: torch.Tensor, scratch: torch.Tensor) -> None:
        """Launch what puts ``host``, the file's bytes [begin, end), where they belong.

        ``scratch``: uint8 on the device, as large as ``host`` at least.
        """
        first, last = begin - self.extent.begin, end - self.extent.begin
        if self.as_stored:
            self.out.view(-1).view(torch.uint8)[first:last].copy_(host, non_blocking=True)
            return
        scratch = scratch[: last - first]
        scratch.copy_(host, non_blocking=True)
        values, part = scratch.view(self.extent.dtype), self.extent.part
        if part is None:
            size = self.extent.dtype.itemsize
            out = self.out.view(-1)[first // size : last // size]
        else:
            values = part.of(values.view(-1, *self.extent.shape[1:]))
            out = self.out[first // self.unit : last // self.unit]
        if self.scale == 1.0 and self.offset == 0.0:
            out.copy_(values)
        else:
            out.copy_(values.to(torch.float32) * self.scale + self.offset)


@dataclass(slots=True)
class _Piece:
    """Bytes [begin, end) of a file, and which of them belong to what: (wanted, begin, end), within the piece."""

    path: Path
    begin: int
    end: int
    segments: list[tuple[_Wanted, int, int]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.end - self.begin


def _pieces(wanted: Sequence[_Wanted], piece_bytes: int) -> list[_Piece]:
    """All that is wanted, in the order of the files. A piece is larger than ``piece_bytes`` only for a longer row."""
    pieces: list[_Piece] = []
    some = [one for one in wanted if one.extent.begin < one.extent.end]
    for one in sorted(some, key=lambda one: (str(one.extent.path), one.extent.begin)):
        extent, step = one.extent, max(1, piece_bytes // one.unit) * one.unit
        for begin in range(extent.begin, extent.end, step):
            end = min(begin + step, extent.end)
            last = pieces[-1] if pieces and pieces[-1].path == extent.path else None
            if last is None or not 0 <= begin - last.end <= _GAP or end - last.begin > piece_bytes:
                pieces.append(last := _Piece(extent.path, begin, begin))
            last.segments.append((one, begin, end))
            last.end = end
    return pieces


def _read(file: int, piece: _Piece, host: torch.Tensor, free: Callable[[], None]) -> None:
    """Fill ``host`` with a piece of an open file, once it is ``free``: in the thread of a reader."""
    free()
    place: Any = host.numpy()
    done = 0
    while done < piece.size:
        try:
            count = os.preadv(file, [place[done : piece.size]], piece.begin + done)
        except OSError as error:
            raise ModelLoadError(
                f"{piece.path}: cannot be read ({error.strerror}); check the disk, or download it again"
            ) from error
        if count == 0:
            raise ModelLoadError(
                f"{piece.path}: truncated: ends at byte {piece.begin + done}, its header asks for more; "
                "download it again"
            )
        done += count


class StagedSource:
    """A ``TensorSource`` that reads safetensors to a device, all at once when asked to :meth:`complete`.

    Args:
        source: the checkpoint.
        device: tensors elsewhere are read at once, by ``source`` itself.
        copies: how to get there; None: the device's own way.
        piece_bytes, buffers, readers: how much is read at once, into how many buffers, by how many threads.

    Attributes:
        bytes_read: of the files, until now.
        seconds: that it took.
    """

    def __init__(
        self,
        source: SafetensorsSource,
        device: torch.device,
        *,
        copies: Copies | None = None,
        piece_bytes: int = PIECE_BYTES,
        buffers: int = BUFFERS,
        readers: int = READERS,
    ) -> None:
        self._source = source
        self._device = device
        self._copies = copies or (CudaCopies(device) if device.type == "cuda" else Copies())
        self._piece_bytes, self._num_buffers, self._num_readers = piece_bytes, buffers, readers
        self._buffers: list[torch.Tensor] = []
        self._scratch: torch.Tensor | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._wanted: list[_Wanted] = []
        self.bytes_read = 0
        self.seconds = 0.0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._source.shapes()

    def where(self, name: str) -> str:
        return self._source.where(name)

    def files(self) -> list[Path]:
        return self._source.files()

    def read(
        self, name: str, out: torch.Tensor, *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> None:
        if not self._here(out) or not out.is_contiguous():
            self._source.read(name, out, scale=scale, offset=offset, part=part)
            return
        self._wanted.append(_Wanted(self._source.extent(name, part), out, scale, offset))

    def raw(self, name: str) -> torch.Tensor:
        """The tensor as it is stored, on the device, now."""
        extent = self._source.raw_extent(name)
        out = torch.empty(extent.shape, dtype=extent.dtype, device=self._device)
        self._transfer([_Wanted(extent, out)])
        return out

    def complete(self) -> None:
        """Read all that was asked for; then give the buffers back.

        Raises:
            ModelLoadError: a file cannot be read, or ends too early.
        """
        wanted, self._wanted = self._wanted, []
        self._transfer(wanted)
        self._dismiss()
        self._buffers, self._scratch = [], None
        self._copies.release()

    def __str__(self) -> str:
        rate = self.bytes_read / max(self.seconds, 1e-9)
        return f"{self.bytes_read / 1e9:.2f} GB read in {self.seconds:.2f} s ({rate / 1e9:.2f} GB/s)"

    def _here(self, out: torch.Tensor) -> bool:
        return out.device.type == self._device.type and self._device.index in (None, out.device.index)

    @torch.inference_mode()
    def _transfer(self, wanted: Sequence[_Wanted]) -> None:
        started = time.perf_counter()
        total = sum(one.extent.end - one.extent.begin for one in wanted)
        # A single tensor, too, is read by all readers.
        pieces = _pieces(wanted, min(self._piece_bytes, max(_LEAST_PIECE, total // self._num_readers)))
        if not pieces:
            return
        self._make_buffers(max(piece.size for piece in pieces), len(pieces))
        self._copies.begin()
        with contextlib.ExitStack() as opened:
            files = {path: _open(path, opened) for path in {piece.path: None for piece in pieces}}
            if self._readers is None:
                self._readers = ThreadPoolExecutor(self._num_readers, thread_name_prefix="carousel-weights")
            try:
                self._pump(pieces, self._readers, files)
            except BaseException:  # no reader may be left behind that fills a buffer, or reads a closed file
                self._dismiss()
                raise
            finally:
                self._copies.end()
        self.bytes_read += sum(piece.size for piece in pieces)
        self.seconds += time.perf_counter() - started

    def _dismiss(self) -> None:
        readers, self._readers = self._readers, None
        if readers is not None:
            readers.shutdown(cancel_futures=True)

    def _pump(self, pieces: Sequence[_Piece], readers: ThreadPoolExecutor, files: dict[Path, int]) -> None:
        """Read the pieces in order, each into the next buffer in turn, and launch the copies of each that is there."""
        count = len(self._buffers)
        free: list[Callable[[], None]] = [_nothing] * count
        being_read: deque[tuple[int, Future[None]]] = deque()

        def launch_oldest() -> None:
            number, future = being_read.popleft()
            future.result()
            free[number % count] = self._copies.run(lambda: self._land(pieces[number], self._buffers[number % count]))

        for number, piece in enumerate(pieces):
            if len(being_read) == count:
                launch_oldest()
            turn = number % count
            being_read.append(
                (number, readers.submit(_read, files[piece.path], piece, self._buffers[turn], free[turn]))
            )
        while being_read:
            launch_oldest()

    def _land(self, piece: _Piece, host: torch.Tensor) -> None:
        assert self._scratch is not None
        for wanted, begin, end in piece.segments:
            wanted.land(begin, end, host[begin - piece.begin : end - piece.begin], self._scratch)

    def _make_buffers(self, size: int, count: int) -> None:
        """As many as so many pieces of at most ``size`` bytes can use; those of a transfer before stay."""
        size = max(size, self._piece_bytes)
        if self._scratch is None or self._scratch.numel() < size:
            self._buffers = []
            self._scratch = torch.empty(size, dtype=torch.uint8, device=self._device)
        for _ in range(len(self._buffers), min(count, self._num_buffers)):
            self._buffers.append(self._copies.buffer(self._scratch.numel()))


def _open(path: Path, opened: contextlib.ExitStack) -> int:
    """Without advice on how it will be read: several readers of large pieces were slower with any."""
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror}); check the path and its mode") from error
    opened.callback(os.close, file)
    return file
