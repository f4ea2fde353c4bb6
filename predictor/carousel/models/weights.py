"""Named tensors of a checkpoint, read straight into the decoder's (fused) tensors.

A ``TensorSource`` knows the tensors of a checkpoint by canonical names: Hugging Face's, without the leading
``model.``. ``Weights`` puts them where the decoder wants them, part by part, so that beside the finished tensors there
is never more than one small buffer: the peak memory of a load is the weights themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from .errors import ModelLoadError
from .families import DecoderConfig

_CHUNK_ELEMENTS = 1 << 22
_PAGE = mmap.ALLOCATIONGRANULARITY


class TensorSource(Protocol):
    """The tensors of one checkpoint."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Canonical name -> shape, for every tensor."""

    def where(self, name: str) -> str:
        """The file that holds the tensor, for messages."""

    def read(self, name: str, out: torch.Tensor, *, scale: float = 1.0, offset: float = 0.0) -> None:
        """Write tensor * scale + offset, computed in float32, into ``out``: same shape, any float dtype and device."""


def copy_rows(source: torch.Tensor, out: torch.Tensor, scale: float = 1.0, offset: float = 0.0) -> None:
    """``out[...] = source * scale + offset`` for equal shapes, in pieces, so that no full-size temporary exists."""
    if scale == 1.0 and offset == 0.0:
        out.copy_(source)
        return
    rows = max(1, _CHUNK_ELEMENTS // max(1, source[0].numel()))
    for start in range(0, source.shape[0], rows):
        piece = source[start : start + rows].to(torch.float32) * scale + offset
        out[start : start + rows].copy_(piece)


class DictSource:
    """Tensors that are already in memory, under canonical names or transformers' own."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        names = canonical_names(tensors)
        self._tensors = {name: tensors[raw] for name, raw in names.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def where(self, name: str) -> str:
        return "memory"

    def read(self, name: str, out: torch.Tensor, *, scale: float = 1.0, offset: float = 0.0) -> None:
        copy_rows(self._tensors[name], out, scale, offset)


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """Canonical name -> the checkpoint's own, without the parts of a vision model and precomputed RoPE buffers.

    The text model's prefix (``model.``, ``model.language_model.``, ``language_model.model.`` or none) is read off the
    name of the embedding.
    """
    names = list(names)
    anchor = "embed_tokens.weight"
    prefixes = [name[: -len(anchor)] for name in names if name.endswith(anchor)]
    prefix = min(prefixes, key=len) if prefixes else "model."
    result = {}
    for name in names:
        if name.endswith("lm_head.weight"):
            result["lm_head.weight"] = name
        elif name.startswith(prefix) and not name.endswith(("rotary_emb.inv_freq", ".masked_bias")):
            short = name[len(prefix) :]
            if not short.startswith(("vision_tower.", "multi_modal_projector.", "vision_model.")):
                result[short] = name
        elif not name.endswith("rotary_emb.inv_freq") and not ("vision" in name or "multi_modal" in name):
            result[name] = name
    return result


def drop_pages(mapped: mmap.mmap, begin: int, end: int) -> None:
    """Give back the pages of a file mapping that lie in [begin, end): read and copied, they are not needed again."""
    first, length = begin // _PAGE * _PAGE, end // _PAGE * _PAGE - begin // _PAGE * _PAGE
    if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
        mapped.madvise(mmap.MADV_DONTNEED, first, length)


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class _SafetensorsFile:
    """One memory-mapped safetensors file. Pages are dropped once read, so that they do not count as this process's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                head = file.read(8)
                if len(head) < 8:
                    raise ModelLoadError(f"{path}: its header is cut off; download it again")
                length: int = struct.unpack("<Q", head)[0]
                if length > min(size, 100 << 20):
                    raise ModelLoadError(
                        f"{path}: not a safetensors file, or truncated (its header does not fit its {size} bytes); "
                        "download it again"
                    )
                self.entries: dict[str, Any] = json.loads(file.read(length))
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read ({error.strerror}); check the path and its mode") from error
        except ValueError as error:
            raise ModelLoadError(
                f"{path}: its safetensors header is not valid JSON; the file is damaged, download it again"
            ) from error
        self.entries.pop("__metadata__", None)
        self.start = 8 + length
        end = max((entry["data_offsets"][1] for entry in self.entries.values()), default=0)
        if self.start + end > size:
            raise ModelLoadError(
                f"{path}: truncated: has {size} bytes, its header asks for {self.start + end}; download it again"
            )

    def read(self, name: str, out: torch.Tensor, scale: float, offset: float) -> None:
        entry = self.entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has dtype {entry['dtype']}, supported: {', '.join(_DTYPES)}; "
                "use an unquantised version of the model, or a GGUF file"
            )
        begin, end = (self.start + at for at in entry["data_offsets"])
        if begin == end:
            return
        flat = torch.frombuffer(self.map, dtype=torch.uint8, offset=begin, count=end - begin)
        if begin % dtype.itemsize:  # allowed by the format's early versions; a typed view needs alignment
            flat = flat.clone()
        copy_rows(flat.view(dtype).view(entry["shape"]), out, scale, offset)
        drop_pages(self.map, begin, end)


class SafetensorsSource:
    """One or more safetensors files as one checkpoint."""

    def __init__(self, files: Sequence[Path]) -> None:
        owners: dict[str, _SafetensorsFile] = {}
        for path in files:
            file = _SafetensorsFile(path)
            owners.update(dict.fromkeys(file.entries, file))
        self._names = canonical_names(owners)
        self._files = {name: owners[raw] for name, raw in self._names.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._files[name].entries[raw]["shape"]) for name, raw in self._names.items()}

    def where(self, name: str) -> str:
        return str(self._files[name].path)

    def read(self, name: str, out: torch.Tensor, *, scale: float = 1.0, offset: float = 0.0) -> None:
        self._files[name].read(self._names[name], out, scale, offset)


def open_safetensors(directory: Path) -> SafetensorsSource:
    """The checkpoint in a directory: ``model.safetensors``, or the shards that ``*.safetensors.index.json`` lists.

    ModelLoadError if there is none, if a shard is missing, or if only pickled weights are there.
    """
    indexes = sorted(directory.glob("*.safetensors.index.json"))
    if indexes:
        try:
            shards = sorted(set(json.loads(indexes[0].read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{indexes[0]}: not a valid weight index ({error!r}); download it again") from error
        missing = [shard for shard in shards if not (directory / shard).is_file()]
        if missing:
            raise ModelLoadError(
                f"{directory}: {len(missing)} of the {len(shards)} shards that {indexes[0].name} lists are missing "
                f"({', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}); finish the download"
            )
        return SafetensorsSource([directory / shard for shard in shards])
    files = sorted(directory.glob("*.safetensors"))
    if len(files) > 1:  # adapters and consolidated copies lie beside the real one in some repositories
        files = [file for file in files if file.name == "model.safetensors"] or files
    if files:
        return SafetensorsSource(files)
    pickled = sorted([*directory.glob("*.bin"), *directory.glob("*.pt"), *directory.glob("*.pth")])
    if pickled:
        raise ModelLoadError(
            f"{directory}: its weights are pickled ({pickled[0].name}), which can run code when loaded and is refused; "
            "use a version with safetensors, or convert it: save_pretrained(..., safe_serialization=True)"
        )
    raise ModelLoadError(f"{directory}: no weights (*.safetensors or *.gguf) found; check the path or the download")


def trim_heap() -> None:
    """Give freed memory back to the system (glibc). Packing a weight frees the original between two that stay, and
    allocators keep such holes: by the end of a model they would be half its size."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another C library has its own ways
        ctypes.CDLL(None).malloc_trim(0)


class Weights:
    """Hands the decoder its tensors from a source, fused, and in the end tells what was left over.

    Args:
        source: the checkpoint.
        config: gives the sizes that the tensors must have.
        device, dtype: of every tensor handed out.
    """

    def __init__(self, source: TensorSource, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.bytes = 0
        self._source = source
        self._shapes = source.shapes()
        self._used: set[str] = set()

    def tensor(self, name: str, shape: tuple[int, ...], *, scale: float = 1.0, offset: float = 0.0) -> torch.Tensor:
        """The tensor * scale + offset. ModelLoadError, naming it and its file, if missing or of another shape."""
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        self._fill(name, out, scale, offset)
        self.bytes += out.nbytes
        return out

    def fused(self, whole: str, parts: Sequence[tuple[str, int]], columns: int | None) -> torch.Tensor:
        """Tensors stacked along dimension 0: ``whole`` if the checkpoint has it fused already, else the parts.

        ``parts`` are (name, rows); ``columns`` is None for biases.
        """
        rows = sum(count for _, count in parts)
        tail = () if columns is None else (columns,)
        if whole in self._shapes:
            return self.tensor(whole, (rows, *tail))
        out = torch.empty((rows, *tail), dtype=self.dtype, device=self.device)
        at = 0
        for name, count in parts:
            self._fill(name, out[at : at + count], 1.0, 0.0)
            at += count
        self.bytes += out.nbytes
        return out

    def _fill(self, name: str, out: torch.Tensor, scale: float, offset: float) -> None:
        shape = self._shapes.get(name)
        if shape is None:
            close = [other for other in self._shapes if other.split(".")[-2:] == name.split(".")[-2:]]
            hint = f" (it has {close[0]})" if close else ""
            somewhere = next((self._source.where(other) for other in self._shapes), "the checkpoint")
            raise ModelLoadError(
                f"{somewhere}: tensor {name} is missing{hint}; the weights do not belong to this config "
                f"({self.config.architecture}) or the download is incomplete"
            )
        if shape != tuple(out.shape):
            raise ModelLoadError(
                f"{self._source.where(name)}: tensor {name} has shape {list(shape)}, the config asks for "
                f"{list(out.shape)}; the weights do not belong to this config"
            )
        self._source.read(name, out, scale=scale, offset=offset)
        self._used.add(name)

    def finish(self) -> None:
        """ModelLoadError if the checkpoint has tensors that the decoder does not know: ignoring them would be wrong."""
        known = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        left = sorted(set(self._shapes) - self._used - known)
        if left:
            raise ModelLoadError(
                f"{self._source.where(left[0])}: {len(left)} unexpected tensors "
                f"({', '.join(left[:4])}{', …' if len(left) > 4 else ''}); this is not a plain "
                f"{self.config.architecture}, and without them its output would be wrong"
            )
