"""Quantisation while loading: linear layers become 8-bit integers, or bfloat16 between activations in float32, one at a
time, and can come from prepared weights.

For 8 bits the residual stream is rotated on the way, where the family allows (see ``rotation``): its activations then
fit 8 bits. Apart from that, the embedding's table, norms and biases stay as they are; a tied output layer is made from
the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

import carousel_kernels as ck
from carousel_kernels.half_weights import HALF_LAYOUT_VERSION
from carousel_kernels.int8_weights import LAYOUT_VERSION, turn, turns

from .decoder import Decoder
from .families import DecoderConfig
from .parallel import ALONE, Part, Ranks
from .prepared import PreparedStore, weights_key
from .rotation import rotate, rotate_back
from .weights import DecoderWeights, Linear, LinearLayer, TensorSource, Weights

__all__ = ["HALF", "SCHEMES", "PreparedWeights", "QuantizingWeights", "quantized_decoder", "scheme_of"]

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")

SCHEMES = ("none", "int8")
"""What ``--quantization`` takes, besides auto."""

HALF = "bfloat16"
"""The scheme of ``--dtype bfloat16`` on a CPU."""

_NARROW = (".qkv_proj", ".o_proj")
_READERS = {"qkv_proj": "input_layernorm", "gate_up_proj": "post_attention_layernorm"}
"""Layers that read the residual stream -> the norm between."""
_WRITERS = (".o_proj", ".down_proj")
_LAYER_NORMS = tuple(f".{norm}.weight" for norm in _READERS.values())
_PIECE_ELEMENTS = 1 << 22
_ENOUGH_TURNS = 8  # fewer spread an outlier too little


def _can_rotate(config: DecoderConfig) -> bool:
    """Whether the residual stream can be rotated: not where branches end in norms of their own, which a rotation does
    not commute with."""
    return not config.post_norms


def _is_turned(name: str, inputs: int) -> bool:
    """Whether a layer's rows are turned before they are quantised: of what comes out of the MLPs' activations, which no
    rotation of the stream reaches, a few channels are many times as large as the others."""
    return name.endswith(".down_proj") and turns(inputs) >= _ENOUGH_TURNS


def _is_wide(name: str, inputs: int, config: DecoderConfig) -> bool:
    """Whether a layer's activations need 16 bits: where neither rotating the stream nor turning rows deals with
    channels that are many times as large as the others; measured with ``scripts/quality.py``."""
    if name.endswith(".down_proj"):
        return not _is_turned(name, inputs)
    return not _can_rotate(config) and not name.endswith(_NARROW)


def _norm_before(name: str) -> str | None:
    """The name of the norm whose result a linear layer reads; None for one that does not read the residual stream."""
    if name == "lm_head":
        return "norm.weight"
    place, _, kind = name.rpartition(".")
    norm = _READERS.get(kind)
    return None if norm is None else f"{place.rpartition('.')[0]}.{norm}.weight"


def scheme_of(quantization: str, device: torch.device) -> str:
    """What ``--quantization`` means on a device.

    Raises:
        ValueError: it is not known, or does not run there.
    """
    if quantization == "auto":
        return "none"
    if quantization not in SCHEMES:
        raise ValueError(f"quantization {quantization!r} is not known; allowed: auto, {', '.join(SCHEMES)}")
    if quantization != "none" and device.type != "cpu":
        raise ValueError(f"quantization {quantization} does not run on {device.type}; choose none, or auto")
    return quantization


class _Layer(Protocol):
    """A linear layer's weight as it is kept."""

    @property
    def nbytes(self) -> int: ...
    def tensors(self) -> dict[str, torch.Tensor]: ...


@dataclass(frozen=True)
class _Scheme:
    """``verb`` is what it does to weights, for the log."""

    verb: str
    version: int
    parts: tuple[str, ...]
    rotates: bool
    make: Callable[[str, torch.Tensor, torch.Tensor | None], _Layer]
    of: Callable[[Mapping[str, torch.Tensor], int, int], _Layer]
    prepare: Callable[[Any, str, DecoderConfig], Linear]


def _make_int8(name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> ck.QuantizedWeight:
    inputs = weight.shape[1]
    return ck.quantize_weight(turn(weight.float()) / turns(inputs) if _is_turned(name, inputs) else weight, bias)


def _prepare_int8(layer: ck.QuantizedWeight, name: str, config: DecoderConfig) -> Linear:
    wide, turned = _is_wide(name, layer.inputs, config), _is_turned(name, layer.inputs)
    return ck.prepare_quantized_linear(layer, wide=wide, turned=turned)


def _prepare_half(layer: ck.HalfWeight, name: str, config: DecoderConfig) -> Linear:
    return ck.prepare_half_linear(layer)


_SCHEMES = {
    "int8": _Scheme(
        "quantised", LAYOUT_VERSION, ("codes", "scales", "shifts", "bias"), True,
        _make_int8, ck.QuantizedWeight.of, _prepare_int8,
    ),
    HALF: _Scheme(
        "rounded", HALF_LAYOUT_VERSION, ("codes", "bias"), False,
        lambda _, weight, bias: ck.halve_weight(weight, bias), ck.HalfWeight.of, _prepare_half,
    ),
}  # fmt: skip


class QuantizingWeights(Weights):
    """Quantises every linear layer as soon as it is read, so that only one is there in full at a time.

    ``made`` has all that was handed out, under the names by which ``PreparedWeights`` finds it.
    """

    def __init__(
        self,
        source: TensorSource,
        config: DecoderConfig,
        dtype: torch.dtype,
        scheme: str,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(source, config, _CPU, dtype, ranks)
        self._scheme = _SCHEMES[scheme]
        self.made: dict[str, torch.Tensor] = {}
        self._passing = False  # what is read now does not stay
        self._rotated = self._scheme.rotates and _can_rotate(config)
        self._norms: dict[str, torch.Tensor] = {}  # that wait for the layer which takes them in

    def tensor(
        self, name: str, shape: tuple[int, ...], *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> torch.Tensor:
        out = super().tensor(name, shape, scale=scale, offset=offset, part=part)
        if self._passing:
            return out
        if self._rotated and name == "embed_tokens.weight":
            _in_pieces(out, rotate)
        elif self._rotated and (name == "norm.weight" or name.endswith(_LAYER_NORMS)):
            self._norms[name] = out.clone()
            out.fill_(1.0)
        self.made[name] = out
        return out

    def linear(self, layer: LinearLayer) -> Linear:
        before, self._passing = self.bytes, True
        weight, bias = layer.read(), layer.read_bias()
        self._passing = False
        if self._rotated:
            weight, bias = self._rotate(layer.name, weight, bias)
        quantized = self._scheme.make(layer.name, weight, bias)
        self.bytes = before + quantized.nbytes
        self.made |= {f"{layer.name}.{part}": tensor for part, tensor in quantized.tensors().items()}
        return self._scheme.prepare(quantized, layer.name, self.config)

    def _rotate(
        self, name: str, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        norm = _norm_before(name)
        if norm is not None:
            scale = self._norms.pop(norm).float()
            tied = name == "lm_head" and self.config.tie_word_embeddings  # then it is the embeddings, rotated already
            out = torch.empty(weight.shape)
            out.copy_(weight)
            _in_pieces(out, lambda rows: rotate((rotate_back(rows) if tied else rows) * scale))
            return out, bias
        if not name.endswith(_WRITERS):
            return weight, bias
        turned = rotate(weight.float().t().contiguous()).t().contiguous()
        return turned, None if bias is None else rotate(bias.float().unsqueeze(0)).squeeze(0)


def _in_pieces(x: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace x [T, n] by what a function of its rows, in float32, gives, without another copy of all of them."""
    for rows in x.split(max(1, _PIECE_ELEMENTS // x.shape[1])):
        rows.copy_(function(rows.float()))


class PreparedWeights(DecoderWeights):
    """Hands out what ``QuantizingWeights`` made of the same checkpoint.

    Raises (from all methods):
        ValueError: a tensor is missing or is not what the config asks for.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        config: DecoderConfig,
        dtype: torch.dtype,
        scheme: str,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(config, _CPU, dtype, ranks)
        self._tensors = tensors
        self._scheme = _SCHEMES[scheme]

    def tensor(
        self, name: str, shape: tuple[int, ...], *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> torch.Tensor:
        tensor, shape = self._tensors.get(name), shape if part is None else part.shape_of(shape)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
            raise ValueError(f"{name}: not {self.dtype} {list(shape)}")
        self.bytes += tensor.nbytes
        return tensor

    def linear(self, layer: LinearLayer) -> Linear:
        parts = {part: self._tensors.get(f"{layer.name}.{part}") for part in self._scheme.parts}
        quantized = self._scheme.of({k: v for k, v in parts.items() if v is not None}, *layer.shape)
        self.bytes += quantized.nbytes
        return self._scheme.prepare(quantized, layer.name, self.config)


def quantized_decoder(
    config: DecoderConfig,
    source: TensorSource,
    dtype: torch.dtype,
    scheme: str,
    store: PreparedStore | None,
    max_model_len: int | None,
    ranks: Ranks = ALONE,
) -> tuple[Decoder, str]:
    """A decoder with linear layers of a scheme, "int8" or ``HALF``, and a KV cache in bfloat16, on the CPU: from
    prepared weights, or made now and kept for the next start.

    Returns it and, for the log, how it came about. ModelLoadError as for ``Decoder``.
    """
    files, kind = source.files(), _SCHEMES[scheme]
    now = f", {kind.verb} now"

    def decoder(weights: DecoderWeights) -> Decoder:
        return Decoder(config, weights, kv_dtype=torch.bfloat16, max_model_len=max_model_len)

    if store is None or not files:
        return decoder(QuantizingWeights(source, config, dtype, scheme, ranks)), now
    place = () if ranks.size == 1 else ((ranks.rank, ranks.size),)
    key = weights_key(files, scheme, kind.version, dtype, config, *place, root=store.root)
    tensors = store.load(key)
    if tensors is not None:
        try:
            return decoder(PreparedWeights(tensors, config, dtype, scheme, ranks)), f", {kind.verb} before"
        except ValueError as error:
            _log.warning(
                "the prepared weights in %s are not this model's (%s): preparing them again", store.root, error
            )
    made = QuantizingWeights(source, config, dtype, scheme, ranks)
    return decoder(made), now + (" and kept" if store.save(key, made.made) else "")
