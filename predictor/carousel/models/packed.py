"""Checkpoints whose linear layers are quantised already: GPTQ, AWQ, FP8 and integers as compressed-tensors writes them.

What ``quantization_config`` of config.json says is read into a :class:`Scheme`; a :class:`PackedSource` then shows the
checkpoint as if its weights were plain, and widens them as they are read. That is how the CPU takes them, in the type
of ``--dtype``, or int8 with ``--quantization int8``. A GPU takes them packed, by :class:`PackedWeights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

import carousel_kernels as ck
from carousel_kernels.weight_formats import (
    GroupedWeight,
    PackedWeight,
    grouped_from_awq,
    grouped_from_gptq,
    grouped_from_packed,
    scaled,
    scaled_by_blocks,
)

from .errors import ModelLoadError
from .parallel import Part
from .weights import Linear, LinearLayer, Piece, TensorSource, Weights, copy_rows

__all__ = ["PackedSource", "PackedWeights", "RawSource", "Scheme", "scheme_of_checkpoint"]

_FIELDS = (
    *("qweight", "qzeros", "scales", "g_idx", "weight_scale", "weight_scale_inv", "input_scale", "activation_scale"),
    *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx", "input_zero_point"),
)
_CACHE_SCALES = (
    "k_scale",
    "v_scale",
    "q_scale",
    "output_scale",
)  # of an FP8 KV cache, which is not this model's choice


class RawSource(TensorSource, Protocol):
    """A checkpoint that hands out tensors as they are stored."""

    def raw(self, name: str) -> torch.Tensor:
        """The tensor in its own type."""


@dataclass(frozen=True)
class Scheme:
    """How a checkpoint's linear layers are quantised.

    Attributes:
        method: "gptq", "awq", "scaled" (FP8 or int8, a scale per tensor, output feature or block) or "packed"
            (compressed-tensors' integers).
        name: for the log and for messages.
        bits, group_size: of integers with groups; -1: one group.
        zero_offset: of GPTQ's zero points.
        block: output and input features per scale; None: a scale per tensor or output feature.
    """

    method: str
    name: str
    bits: int = 8
    group_size: int = -1
    zero_offset: int = 1
    block: tuple[int, int] | None = None


def _refuse(what: str, value: object, allowed: str) -> ModelLoadError:
    return ModelLoadError(
        f"config.json: quantization_config: {what} is {value!r}, supported: {allowed}; "
        "use an unquantised version of the model, or a GGUF file"
    )


def scheme_of_checkpoint(hf: Mapping[str, Any]) -> Scheme | None:
    """What ``quantization_config`` (or ``compression_config``) says; None for a checkpoint that is not quantised.

    Raises:
        ModelLoadError: the format, or its variant, is not supported; says which are.
    """
    config = hf.get("quantization_config") or hf.get("compression_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise _refuse("it", config, "an object")
    method = config.get("quant_method")
    readers: dict[str, Callable[[dict[str, Any]], Scheme]] = {
        "gptq": _gptq, "awq": _awq, "fp8": _fp8, "fbgemm_fp8": _fp8, "compressed-tensors": _compressed,
    }  # fmt: skip
    if method not in readers:
        raise _refuse("quant_method", method, ", ".join(readers))
    return readers[method](config)


def _choice(config: Mapping[str, Any], field: str, allowed: tuple[Any, ...], default: Any) -> Any:
    value = config.get(field, default)
    if value not in allowed:
        raise _refuse(field, value, ", ".join(map(str, allowed)))
    return value


def _gptq(config: dict[str, Any]) -> Scheme:
    bits = _choice(config, "bits", (4, 8), 4)
    form = _choice(config, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if config.get("dynamic"):
        raise _refuse("dynamic", "a choice per layer", "one choice for all layers")
    size = int(config.get("group_size", 128))
    return Scheme("gptq", f"GPTQ in {bits} bits", bits, size, int(form == "gptq"))


def _awq(config: dict[str, Any]) -> Scheme:
    _choice(config, "bits", (4,), 4)
    _choice(config, "version", ("gemm", "GEMM"), "gemm")
    _choice(config, "zero_point", (True,), True)
    return Scheme("awq", "AWQ in 4 bits", 4, int(config.get("group_size", config.get("q_group_size", 128))))


def _fp8(config: dict[str, Any]) -> Scheme:
    _choice(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = config.get("weight_block_size")
    return Scheme("scaled", "FP8", block=None if block is None else (int(block[0]), int(block[1])))


def _compressed(config: dict[str, Any]) -> Scheme:
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise _refuse("config_groups", f"{len(groups)} groups", "one for all layers")
    group = next(iter(groups.values()))
    weights = group.get("weights") or {}
    form = group.get("format") or config.get("format")
    if config.get("sparsity_config", {}).get("format", "dense") != "dense":
        raise _refuse("sparsity_config", config["sparsity_config"].get("format"), "dense")
    kind, bits = (weights.get("type"), weights.get("num_bits"))
    if form in ("float-quantized", "int-quantized", "naive-quantized"):
        if (kind, bits) not in (("float", 8), ("int", 8)):
            raise _refuse("weights", f"{kind} of {bits} bits", "float or int of 8 bits")
        strategy = _choice(weights, "strategy", ("tensor", "channel", "block"), "tensor")
        block = weights.get("block_structure") if strategy == "block" else None
        if kind == "int" and not weights.get("symmetric", True):
            raise _refuse("weights.symmetric", False, "true")
        name = "FP8" if kind == "float" else "int8"
        return Scheme("scaled", name, block=None if block is None else (int(block[0]), int(block[1])))
    if form == "pack-quantized":
        _choice(weights, "num_bits", (4, 8), None)
        _choice(weights, "symmetric", (True,), True)
        _choice(weights, "strategy", ("group", "channel"), "group")
        _choice(weights, "actorder", (None, "static", "weight"), None)
        width, size = int(weights["num_bits"]), weights.get("group_size") or -1
        return Scheme("packed", f"integers of {width} bits", width, int(size))
    raise _refuse("format", form, "float-quantized, int-quantized, pack-quantized")


class PackedSource:
    """A quantised checkpoint as a ``TensorSource`` of plain weights.

    Args:
        source: the checkpoint; kept as ``source``.
        scheme: how it is quantised. Layers that it left plain are found by their names.

    Raises:
        ModelLoadError: a layer lacks a part, or has one that does not fit.
    """

    def __init__(self, source: RawSource, scheme: Scheme) -> None:
        self.source = source
        self.scheme = scheme
        shapes = dict(source.shapes())
        self._layers: dict[str, set[str]] = {}
        for name in shapes:
            layer, _, field = name.rpartition(".")
            if field in _FIELDS:
                self._layers.setdefault(layer, set()).add(field)
        self._layers = {
            layer: fields for layer, fields in self._layers.items() if fields - {"input_scale", "activation_scale"}
        }
        self._shapes = {
            name: shape for name, shape in shapes.items() if name.rpartition(".")[2] not in (*_FIELDS, *_CACHE_SCALES)
        }
        for layer in self._layers:
            self._shapes[f"{layer}.weight"] = self._shape(layer, shapes)

    def _shape(self, layer: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Of the plain weight, as far as can be told without reading it."""
        scheme = self.scheme
        if scheme.method == "gptq":
            packed = shapes.get(f"{layer}.qweight", (0, 0))
            return packed[1], packed[0] * (32 // scheme.bits)
        if scheme.method == "awq":
            packed = shapes.get(f"{layer}.qweight", (0, 0))
            return packed[1] * 8, packed[0]
        if scheme.method == "packed":
            packed = shapes.get(f"{layer}.weight_packed", (0, 0))
            if f"{layer}.weight_shape" in shapes:
                rows, columns = self.source.raw(f"{layer}.weight_shape").tolist()
                return int(rows), int(columns)
            return packed[0], packed[1] * (32 // scheme.bits)
        return shapes.get(f"{layer}.weight", (0, 0))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def where(self, name: str) -> str:
        layer, _, field = name.rpartition(".")
        fields = self._layers.get(layer)
        return self.source.where(f"{layer}.{min(fields)}" if fields and field == "weight" else name)

    def files(self) -> Sequence[Path]:
        return self.source.files()

    def read(
        self, name: str, out: torch.Tensor, *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> None:
        layer, _, field = name.rpartition(".")
        if field != "weight" or layer not in self._layers:
            self.source.read(name, out, scale=scale, offset=offset, part=part)
            return
        weight = self.packed(layer)
        assert weight is not None
        if part is not None and part.dim == 0:
            weight, part = weight.part(0, part.begin, part.end), None
        dense = weight.dense(torch.float32)
        copy_rows(dense if part is None else part.of(dense), out, scale, offset)

    def complete(self) -> None:
        self.source.complete()

    def packed(self, layer: str) -> PackedWeight | None:
        """A layer's weight as it is stored, unpacked to one form; None if it is plain.

        Raises:
            ModelLoadError: a part is missing, or does not fit.
        """
        fields = self._layers.get(layer)
        if fields is None:
            return None

        def raw(field: str) -> torch.Tensor:
            if field not in fields and field != "weight":
                raise ModelLoadError(
                    f"{self.where(f'{layer}.weight')}: {layer} has no {field}, which {self.scheme.name} needs; "
                    "the weights do not belong to this config, or the download is incomplete"
                )
            return self.source.raw(f"{layer}.{field}")

        try:
            return self._unpacked(layer, fields, raw)
        except ValueError as error:
            raise ModelLoadError(
                f"{self.where(f'{layer}.weight')}: {layer}: {error}; "
                f"this variant of {self.scheme.name} is not supported"
            ) from error

    def _unpacked(self, layer: str, fields: set[str], raw: Callable[[str], torch.Tensor]) -> PackedWeight:
        scheme = self.scheme
        if scheme.method == "gptq":
            order = raw("g_idx") if "g_idx" in fields else None
            return grouped_from_gptq(
                raw("qweight"), raw("qzeros"), raw("scales"), order,
                bits=scheme.bits, group_size=scheme.group_size, zero_offset=scheme.zero_offset,
            )  # fmt: skip
        if scheme.method == "awq":
            return grouped_from_awq(raw("qweight"), raw("qzeros"), raw("scales"), group_size=scheme.group_size)
        if scheme.method == "packed":
            features = self._shapes[f"{layer}.weight"][1]
            return grouped_from_packed(
                raw("weight_packed"), raw("weight_scale"),
                bits=scheme.bits, group_size=scheme.group_size, features=features,
            )  # fmt: skip
        weight = raw("weight")
        if scheme.block is not None:
            scale = raw("weight_scale_inv" if "weight_scale_inv" in fields else "weight_scale")
            return scaled_by_blocks(weight, scale, scheme.block)
        return scaled(weight, raw("weight_scale"), "keep")


class PackedWeights(Weights):
    """``Weights`` of a :class:`PackedSource` whose quantised layers stay packed."""

    _source: PackedSource

    def linear(self, layer: LinearLayer) -> Linear:
        weight = self._packed(layer.name, layer.pieces)
        if weight is None or (weight.q.shape[0], weight.q.shape[1]) != layer.shape:
            return super().linear(layer)
        weight = _moved(weight.times(layer.scale), self.device)
        self.bytes += weight.q.nbytes // (2 if getattr(weight, "bits", 8) == 4 else 1) + weight.scales.nbytes
        return ck.prepare_packed_linear(weight, layer.read_bias())

    def _packed(self, name: str, pieces: Sequence[Piece]) -> PackedWeight | None:
        """The pieces' parts as one weight; None if they are plain, or do not go together."""
        found: list[PackedWeight] = []
        whole, before = self._source.packed(name), 0
        for piece in pieces:
            source, first = (self._source.packed(piece.name), 0) if whole is None else (whole, before)
            if source is None:
                return None
            part, before = piece.part, before + piece.rows
            start = first if part.dim == 0 else 0
            try:
                found.append(source.part(part.dim, start + part.begin, start + part.end))
            except ValueError as error:
                where = self._source.where(f"{name if whole is not None else piece.name}.weight")
                raise ModelLoadError(
                    f"{where}: {piece.name} cannot be split among {self.ranks.size} ranks: {error}"
                ) from error
        kinds = {type(weight) for weight in found}
        if len(kinds) != 1:
            return None
        together: PackedWeight | None = kinds.pop().stacked(found)  # type: ignore[arg-type]
        if together is not None:
            names = [name] if whole is not None else [piece.name for piece in pieces]
            self._used |= {f"{used}.weight" for used in names}
        return together


def _moved(weight: PackedWeight, device: torch.device) -> PackedWeight:
    q, scales = weight.q.to(device), weight.scales.to(device)
    if not isinstance(weight, GroupedWeight):
        return replace(weight, q=q, scales=scales)
    order = None if weight.order is None else weight.order.to(device)
    return replace(weight, q=q, scales=scales, zeros=weight.zeros.to(device), order=order)
