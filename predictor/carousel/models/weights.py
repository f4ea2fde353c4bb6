"""Named tensors of a checkpoint, read straight into the decoder's (fused) tensors.

A ``TensorSource`` knows the tensors of a checkpoint by canonical names: Hugging Face's, without the leading
``model.``. ``Weights`` puts them where the decoder wants them, part by part, so that beside the finished tensors there
is never more than one small buffer: the peak memory of a load is the weights themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import mmap
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

import carousel_kernels as ck

from .errors import ModelLoadError
from .families import DecoderConfig
from .files import check_regular, parse_object, read_text
from .parallel import ALONE, Part, Ranks, Split

_CHUNK_ELEMENTS = 1 << 22
_PAGE = mmap.ALLOCATIONGRANULARITY


class TensorSource(Protocol):
    """The tensors of one checkpoint."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Canonical name -> shape, for every tensor."""

    def where(self, name: str) -> str:
        """The file that holds the tensor, for messages."""

    def files(self) -> Sequence[Path]:
        """All files that hold tensors; none for what is in memory only."""

    def read(
        self, name: str, out: torch.Tensor, *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> None:
        """Write tensor * scale + offset, computed in float32, into ``out``: same shape, any float dtype and device.

        With ``part`` only that of the tensor, and as little else as possible is read. A source may put it off until
        :meth:`complete`, as one for GPUs does; before that nobody looks at what is in ``out``.
        """

    def complete(self) -> None:
        """Have all that :meth:`read` was asked for be there."""


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

    def files(self) -> list[Path]:
        return []

    def read(
        self, name: str, out: torch.Tensor, *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> None:
        tensor = self._tensors[name]
        copy_rows(tensor if part is None else part.of(tensor), out, scale, offset)

    def complete(self) -> None:
        pass


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


_RAW_DTYPES = _DTYPES | {
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
}
_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2}
_SIZES |= {"I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}
MAX_HEADER_BYTES = 32 * 2**20
"""Of a safetensors header. The largest models' have some MB, and parsed it takes ten times its size."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a tensor lies: bytes [``begin``, ``end``) of a file are ``shape`` of ``dtype``, row by row.

    ``part``: what is wanted of it, where that is no range of the file.
    """

    path: Path
    begin: int
    end: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: Part | None = None


class _SafetensorsFile:
    """One memory-mapped safetensors file. Pages are dropped once read, so that they do not count as this process's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = check_regular(path)
        try:
            with path.open("rb") as file:
                head = file.read(8)
                if len(head) < 8:
                    raise ModelLoadError(f"{path}: its header is cut off; download it again")
                length: int = struct.unpack("<Q", head)[0]
                if length > min(size - 8, MAX_HEADER_BYTES):
                    raise ModelLoadError(
                        f"{path}: not a safetensors file, or truncated (its header does not fit its {size} bytes); "
                        "download it again"
                    )
                raw = file.read(length)
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read ({error.strerror}); check the path and its mode") from error
        try:
            self.entries: dict[str, Any] = json.loads(raw.decode("utf-8"), object_pairs_hook=_once)
            if not isinstance(self.entries, dict):
                raise ValueError("it is not an object")
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(
                f"{path}: its safetensors header is not valid JSON ({error}); the file is damaged, download it again"
            ) from error
        self.entries.pop("__metadata__", None)
        if not self.entries:
            raise ModelLoadError(f"{path}: holds no tensors; download it again")
        self.start = 8 + length
        self._check_places(size)

    def _check_places(self, size: int) -> None:
        """Every tensor is described, lies within the file and where no other does, and is as large as its shape."""
        taken = 0
        for name, entry in sorted(self.entries.items(), key=lambda item: _begin(item[1])):
            try:
                dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
                sizes = [*shape, begin, end]
                if not isinstance(dtype, str) or any(
                    type(number) is not int or not 0 <= number < 2**62 for number in sizes
                ):
                    raise ValueError("its dtype, shape or data_offsets is of a wrong type or size")
            except (TypeError, KeyError, ValueError) as error:
                raise self._damaged(name, f"is not described ({error})") from error
            if self.start + end > size:
                raise ModelLoadError(
                    f"{self.path}: truncated: has {size} bytes, its header asks for {self.start + end}; "
                    "download it again"
                )
            if begin < taken or begin > end:
                raise self._damaged(name, "overlaps another")
            elements, held = math.prod(shape), end - begin
            if elements * _SIZES[dtype] != held if dtype in _SIZES else elements > 8 * held:
                raise self._damaged(name, f"has {end - begin} bytes, which its shape {_short(shape)} does not fill")
            taken = end

    def _damaged(self, name: str, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path}: tensor {_short(name)} {what}; its header is damaged, download it again")

    def read(self, name: str, out: torch.Tensor, scale: float, offset: float, part: Part | None) -> None:
        extent = self.extent(name, part)
        if extent.begin == extent.end:
            return
        flat = torch.frombuffer(self.map, dtype=torch.uint8, offset=extent.begin, count=extent.end - extent.begin)
        if extent.begin % extent.dtype.itemsize:  # allowed by the format's early versions; typed views need alignment
            flat = flat.clone()
        tensor = flat.view(extent.dtype).view(extent.shape)
        copy_rows(tensor if extent.part is None else extent.part.of(tensor), out, scale, offset)
        drop_pages(self.map, extent.begin, extent.end)

    def raw(self, name: str) -> torch.Tensor:
        """A copy in the tensor's own type."""
        extent = self.raw_extent(name)
        if extent.begin == extent.end:
            return torch.empty(extent.shape, dtype=extent.dtype)
        flat = torch.frombuffer(self.map, dtype=torch.uint8, offset=extent.begin, count=extent.end - extent.begin)
        flat = flat.clone()
        drop_pages(self.map, extent.begin, extent.end)
        return flat.view(extent.dtype).view(extent.shape)

    def extent(self, name: str, part: Part | None) -> Extent:
        """Of a tensor of floats, or of its part."""
        dtype = _DTYPES.get(self.entries[name]["dtype"])
        if dtype is None:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has dtype {self.entries[name]['dtype']}, supported: {', '.join(_DTYPES)}; "
                "use an unquantised version of the model, or a GGUF file"
            )
        whole = self._extent(name, dtype)
        if part is None or part.dim != 0:
            return replace(whole, part=part)
        row = (whole.end - whole.begin) // max(1, whole.shape[0])
        return replace(
            whole,
            begin=whole.begin + part.begin * row,
            end=whole.begin + part.end * row,
            shape=part.shape_of(whole.shape),
        )

    def raw_extent(self, name: str) -> Extent:
        """Of a tensor in its own type."""
        dtype = _RAW_DTYPES.get(self.entries[name]["dtype"])
        if dtype is None:
            raise ModelLoadError(
                f"{self.path}: tensor {name} has dtype {self.entries[name]['dtype']}, "
                f"supported: {', '.join(_RAW_DTYPES)}"
            )
        return self._extent(name, dtype)

    def _extent(self, name: str, dtype: torch.dtype) -> Extent:
        entry = self.entries[name]
        begin, end = (self.start + at for at in entry["data_offsets"])
        return Extent(self.path, begin, end, dtype, tuple(entry["shape"]))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a name is there twice")
    return fields


def _begin(entry: Any) -> int:
    """Where a tensor begins; -1 for an entry that does not say, which is refused first."""
    places = entry.get("data_offsets") if isinstance(entry, dict) else None
    return places[0] if isinstance(places, list) and places and type(places[0]) is int else -1


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:59] + "…"


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

    def files(self) -> list[Path]:
        return sorted({file.path for file in self._files.values()})

    def read(
        self, name: str, out: torch.Tensor, *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> None:
        self._files[name].read(self._names[name], out, scale, offset, part)

    def complete(self) -> None:
        pass

    def raw(self, name: str) -> torch.Tensor:
        """The tensor as it is stored."""
        return self._files[name].raw(self._names[name])

    def extent(self, name: str, part: Part | None = None) -> Extent:
        """Where the tensor lies, or a part of it.

        Raises:
            ModelLoadError: it does not hold floats.
        """
        return self._files[name].extent(self._names[name], part)

    def raw_extent(self, name: str) -> Extent:
        """Where the tensor lies, of whatever type it is.

        Raises:
            ModelLoadError: torch has no such type.
        """
        return self._files[name].raw_extent(self._names[name])


def _shards(index: Path) -> list[str]:
    """The files that a weight index names. They lie beside it: a path to elsewhere is refused."""
    given = parse_object(read_text(index), index).get("weight_map")
    files = list(given.values()) if isinstance(given, dict) else []
    if not files or not all(isinstance(file, str) and file.endswith(".safetensors") for file in files):
        raise ModelLoadError(f"{index}: not a valid weight index (no weight_map of *.safetensors); download it again")
    if odd := [file for file in files if "/" in file or "\\" in file or file.startswith(".") or len(file) > 255]:
        raise ModelLoadError(
            f"{index}: names {_short(odd[0])!r}, which is no plain file name; check where it comes from"
        )
    return sorted(set(files))


def open_safetensors(directory: Path) -> SafetensorsSource:
    """The checkpoint in a directory: ``model.safetensors``, or the shards that ``*.safetensors.index.json`` lists.

    ModelLoadError if there is none, if a shard is missing, or if only pickled weights are there.
    """
    indexes = sorted(directory.glob("*.safetensors.index.json"))
    if indexes:
        shards = _shards(indexes[0])
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


Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """A projection in the checkpoint, its number of output features, and which part of its weight [N, K] is wanted."""

    name: str
    rows: int
    part: Part


@dataclass(frozen=True, slots=True)
class LinearLayer:
    """A layer of a weight [N, K] of this ``shape``, under its canonical ``name``.

    ``read`` and ``read_bias`` give it and its bias, from the decoder's weights, in case they are needed. ``pieces`` are
    what it is made of, in the checkpoint, times ``scale``.
    """

    name: str
    shape: tuple[int, int]
    read: Callable[[], torch.Tensor]
    read_bias: Callable[[], torch.Tensor | None]
    pieces: Sequence[Piece]
    scale: float = 1.0


class DecoderWeights:
    """Where a decoder gets its tensors and linear layers from, by canonical names.

    Attributes:
        config: gives the sizes that the tensors must have.
        device, dtype: of every tensor handed out.
        ranks, split: among whom the decoder is split, and what is held here.
        bytes: of all that was handed out.
    """

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype, ranks: Ranks = ALONE) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self.ranks = ranks
        self.split = Split.of(config, ranks.rank, ranks.size)
        self.bytes = 0

    def tensor(
        self, name: str, shape: tuple[int, ...], *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> torch.Tensor:
        """The tensor * scale + offset, or a part of that. ``shape`` is the whole tensor's.

        ModelLoadError, naming it and its file, if missing or of another shape.
        """
        raise NotImplementedError

    def fused(self, whole: str, pieces: Sequence[Piece], columns: int | None, suffix: str) -> torch.Tensor:
        """The pieces' parts stacked along dimension 0, out of ``whole`` if the checkpoint has it fused already.

        Names are those of layers, to which ``suffix`` is added; ``columns`` is None for biases.
        """
        raise NotImplementedError

    def linear(self, layer: LinearLayer) -> Linear:
        """The layer, prepared for the hot path."""
        raise NotImplementedError

    def finish(self) -> None:
        """Everything was asked for: have it all be there.

        ModelLoadError if there are tensors that the decoder does not know: ignoring them would be wrong.
        """


class Weights(DecoderWeights):
    """Hands the decoder its tensors from a source, fused, and in the end tells what was left over.

    Args:
        source: the checkpoint.
        config: gives the sizes that the tensors must have.
        device, dtype: of every tensor handed out.
        ranks: among whom the decoder is split.

    Raises:
        ModelLoadError: the model cannot be split among so many.
    """

    def __init__(
        self,
        source: TensorSource,
        config: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(config, device, dtype, ranks)
        self._source = source
        self._shapes = source.shapes()
        self._used: set[str] = set()

    def tensor(
        self, name: str, shape: tuple[int, ...], *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> torch.Tensor:
        self._check(name, shape)
        whole = part is None or part.length == shape[part.dim]
        out = torch.empty(shape if part is None else part.shape_of(shape), dtype=self.dtype, device=self.device)
        self._fill(name, out, scale, offset, None if whole else part)
        self.bytes += out.nbytes
        return out

    def fused(self, whole: str, pieces: Sequence[Piece], columns: int | None, suffix: str) -> torch.Tensor:
        tail = () if columns is None else (columns,)
        together = whole + suffix in self._shapes
        if together:
            self._check(whole + suffix, (sum(piece.rows for piece in pieces), *tail))
        else:
            for piece in pieces:
                self._check(piece.name + suffix, (piece.rows, *tail))
        rows = sum(piece.part.length for piece in pieces)
        out = torch.empty((rows, *tail), dtype=self.dtype, device=self.device)
        at = before = 0
        for piece in pieces:
            first = before if together else 0
            part = Part(0, first + piece.part.begin, first + piece.part.end)
            name = (whole if together else piece.name) + suffix
            self._fill(name, out[at : at + part.length], 1.0, 0.0, part)
            at, before = at + part.length, before + piece.rows
        self.bytes += out.nbytes
        return out

    def linear(self, layer: LinearLayer) -> Linear:
        return ck.prepare_linear(layer.read(), layer.read_bias())

    def _check(self, name: str, wanted: tuple[int, ...]) -> None:
        """Before anything is allocated for it: a config may ask for any size, a file has only its own."""
        shape = self._shapes.get(name)
        if shape is None:
            close = [other for other in self._shapes if other.split(".")[-2:] == name.split(".")[-2:]]
            hint = f" (it has {close[0]})" if close else ""
            somewhere = next((self._source.where(other) for other in self._shapes), "the checkpoint")
            raise ModelLoadError(
                f"{somewhere}: tensor {name} is missing{hint}; the weights do not belong to this config "
                f"({self.config.architecture}) or the download is incomplete"
            )
        if shape != wanted:
            raise ModelLoadError(
                f"{self._source.where(name)}: tensor {name} has shape {list(shape)}, the config asks for "
                f"{list(wanted)}; the weights do not belong to this config"
            )

    def _fill(self, name: str, out: torch.Tensor, scale: float, offset: float, part: Part | None) -> None:
        self._source.read(name, out, scale=scale, offset=offset, part=part)
        self._used.add(name)

    def finish(self) -> None:
        known = {"lm_head.weight"} if self.config.tie_word_embeddings else set()
        left = sorted(set(self._shapes) - self._used - known)
        if left:
            raise ModelLoadError(
                f"{self._source.where(left[0])}: {len(left)} unexpected tensors "
                f"({', '.join(left[:4])}{', …' if len(left) > 4 else ''}); this is not a plain "
                f"{self.config.architecture}, and without them its output would be wrong"
            )
        self._source.complete()
