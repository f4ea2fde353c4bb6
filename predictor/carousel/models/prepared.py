"""Prepared weights on disk: what loading made of a checkpoint, so that the next start maps it instead of making it.

``<cache>/prepared/<key>.weights`` is one file of tensors and ``<key>.json``, written last, its manifest: without a
manifest, or with one that the file does not match, there are no prepared weights. The key is a digest of everything
that the tensors follow from. Both files appear whole or not at all, and may be read-only, shared by many processes.

    magic, 8 bytes | header length, uint64 | header, JSON: name -> dtype, shape, offset | tensors, each at 64 bytes
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from carousel_kernels.cpu import choices

from .fetch.cache import sha256_of

__all__ = ["PreparedStore", "weights_key"]

_log = logging.getLogger(__name__)

FORMAT = 1
"""Changes with the file's layout, or with how a decoder makes these tensors from a checkpoint."""

_MAGIC = b"CARQ\r\n\x1a\n"
_ALIGNMENT = 64
_DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.int32)
}
_MAX_HEADER_BYTES = 2**26


@dataclass(frozen=True)
class _Manifest:
    """``mtime_ns`` is the file's when it was written: as long as it is the same, the file is not hashed again."""

    format: int
    size: int
    mtime_ns: int
    sha256: str


def weights_key(files: Sequence[Path], *parts: object, root: Path | None = None) -> str:
    """The key of what is made from ``files`` under conditions ``parts`` (compared by their repr)."""
    digest = hashlib.sha256(repr((FORMAT, *parts)).encode())
    sums = _Checksums(root / "prepared" / "checksums.json" if root else None)
    for file in files:
        digest.update(sums.of(file).encode())
    sums.save()
    return digest.hexdigest()[:32]


class _Checksums:
    """SHA-256 of files, remembered by path, size and time of writing: reading gigabytes at each start takes seconds."""

    def __init__(self, memory: Path | None) -> None:
        self._memory = memory
        self._known: dict[str, Any] = {}
        self._new: dict[str, Any] = {}
        if memory is not None:
            with contextlib.suppress(OSError, ValueError):
                known = json.loads(memory.read_text("utf-8"))
                self._known = known if isinstance(known, dict) else {}

    def of(self, file: Path) -> str:
        file = file.resolve()
        status = file.stat()
        known = self._known.get(str(file))
        stamp = [status.st_size, status.st_mtime_ns]
        if isinstance(known, list) and len(known) == 3 and known[:2] == stamp and isinstance(known[2], str):
            return known[2]
        found = sha256_of(file)
        self._new[str(file)] = [*stamp, found]
        return found

    def save(self) -> None:
        if self._memory is not None and self._new:
            with contextlib.suppress(OSError):  # a cache that is read-only
                self._memory.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._memory, json.dumps(self._known | self._new, indent=1).encode())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that appears whole or not at all. OSError if it cannot be."""
    with _replacing(path) as file:
        file.write(content)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Any]:
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(scratch).chmod(0o644)
        Path(scratch).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(scratch).unlink()
        raise


class PreparedStore:
    """The prepared weights of a cache, and what was measured. ``root`` need not exist and may be read-only."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).expanduser()
        self._folder = self.root / "prepared"

    def load(self, key: str) -> dict[str, torch.Tensor] | None:
        """The tensors of a key, mapped into memory, or None if there are none that are whole. Writing to them changes
        this process's copy only."""
        path = self._folder / f"{key}.weights"
        try:
            manifest = _Manifest(**json.loads((self._folder / f"{key}.json").read_text("utf-8")))
            if manifest.format != FORMAT:
                return None
            status = path.stat()
            if status.st_size != manifest.size:
                raise ValueError(f"it has {status.st_size} bytes instead of {manifest.size}")
            if status.st_mtime_ns != manifest.mtime_ns and sha256_of(path) != manifest.sha256:
                raise ValueError("its checksum is another one")
            return _read(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError, KeyError, struct.error) as error:
            _log.warning("the prepared weights %s are damaged (%s): preparing them again", path, error)
            return None

    def save(self, key: str, tensors: Mapping[str, torch.Tensor]) -> Path | None:
        """Keep tensors under a key. Returns their file, or None, and a line in the log, where it cannot be written."""
        path = self._folder / f"{key}.weights"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            manifest = _write(path, tensors)
            write_whole(self._folder / f"{key}.json", json.dumps(asdict(manifest)).encode())
        except OSError as error:
            _log.info("the prepared weights are not kept: %s cannot be written (%s)", self._folder, error.strerror)
            return None
        return path

    def restore_choices(self) -> dict[str, Any]:
        """Take what was measured on a CPU like this one for measured; returns what is kept, {} for nothing."""
        path = self._choices_path()
        try:
            kept: dict[str, Any] = json.loads(path.read_text("utf-8"))
            choices.restore(kept)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("the measurements in %s cannot be read (%s): measuring again", path, error)
            return {}
        return kept

    def save_choices(self, kept: dict[str, Any]) -> None:
        """Keep what this process has measured, unless that is what is ``kept`` already."""
        measured = choices.saved()
        if measured != kept:
            with contextlib.suppress(OSError):  # a cache that is read-only
                self._folder.mkdir(parents=True, exist_ok=True)
                write_whole(self._choices_path(), json.dumps(measured, indent=1).encode())

    def _choices_path(self) -> Path:
        return self._folder / f"linear-{choices.machine()}.json"


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> _Manifest:
    entries: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        entries[name] = {"dtype": dtype, "shape": list(tensor.shape), "offset": at}
        at += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    header = json.dumps(entries).encode()
    header += b" " * (-(len(_MAGIC) + 8 + len(header)) % _ALIGNMENT)
    digest = hashlib.sha256()
    size = 0
    with _replacing(path) as file:

        def put(data: Any) -> None:
            nonlocal size
            digest.update(data)
            file.write(data)
            size += len(data)

        put(_MAGIC + struct.pack("<Q", len(header)) + header)
        for tensor in tensors.values():
            flat = tensor.detach().contiguous().view(-1)
            put(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
            put(b"\0" * (-flat.nbytes % _ALIGNMENT))
    return _Manifest(FORMAT, size, path.stat().st_mtime_ns, digest.hexdigest())


def _read(path: Path) -> dict[str, torch.Tensor]:
    with path.open("rb") as file:
        head = file.read(len(_MAGIC) + 8)
        if head[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it is another kind of file")
        (length,) = struct.unpack("<Q", head[len(_MAGIC) :])
        if length > _MAX_HEADER_BYTES:
            raise ValueError("its header is too long")
        entries = json.loads(file.read(length))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start, tensors = len(head) + length, {}
    for name, entry in entries.items():
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        count, offset = math.prod(shape), start + entry["offset"]
        flat = (
            torch.frombuffer(mapped, dtype=dtype, offset=offset, count=count) if count else torch.empty(0, dtype=dtype)
        )
        tensors[name] = flat.view(shape)
    return tensors
