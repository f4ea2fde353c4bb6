"""Quantisation while loading: linear layers become 8-bit integers one at a time, and can come from prepared weights.

The embedding's table, norms and biases stay as they are; a tied output layer is quantised from the table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

import carousel_kernels as ck
from carousel_kernels.int8_weights import LAYOUT_VERSION

from .decoder import Decoder
from .families import DecoderConfig
from .parallel import ALONE, Part, Ranks
from .prepared import PreparedStore, weights_key
from .weights import DecoderWeights, Linear, Piece, TensorSource, Weights

__all__ = ["SCHEMES", "PreparedWeights", "QuantizingWeights", "quantized_decoder", "scheme_of"]

_log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_NOW = ", quantised now"

SCHEMES = ("none", "int8")


_NARROW = (".qkv_proj", ".o_proj")


def _is_wide(name: str) -> bool:
    """Whether a layer's activations need 16 bits. A few channels of the last hidden state, and of what goes into and
    comes out of the MLPs, are many times as large as the others; measured with ``scripts/quality.py``."""
    return not name.endswith(_NARROW)


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


class QuantizingWeights(Weights):
    """Quantises every linear layer as soon as it is read, so that only one is there in full at a time.

    ``made`` has all that was handed out, under the names by which ``PreparedWeights`` finds it.
    """

    def __init__(
        self,
        source: TensorSource,
        config: DecoderConfig,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__(source, config, device, dtype, ranks)
        self.made: dict[str, torch.Tensor] = {}
        self._passing = False  # what is read now does not stay

    def tensor(
        self, name: str, shape: tuple[int, ...], *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> torch.Tensor:
        out = super().tensor(name, shape, scale=scale, offset=offset, part=part)
        if not self._passing:
            self.made[name] = out
        return out

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        read: Callable[[], torch.Tensor],
        read_bias: Callable[[], torch.Tensor | None],
        pieces: Sequence[Piece] = (),
        scale: float = 1.0,
    ) -> Linear:
        before, self._passing = self.bytes, True
        quantized = ck.quantize_weight(read(), read_bias())
        self._passing = False
        self.bytes = before + quantized.nbytes
        self.made |= {f"{name}.{part}": tensor for part, tensor in quantized.tensors().items()}
        return ck.prepare_quantized_linear(quantized, wide=_is_wide(name))


class PreparedWeights(DecoderWeights):
    """Hands out what ``QuantizingWeights`` made of the same checkpoint.

    Raises (from all methods):
        ValueError: a tensor is missing or is not what the config asks for.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], config: DecoderConfig, dtype: torch.dtype, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(config, _CPU, dtype, ranks)
        self._tensors = tensors

    def tensor(
        self, name: str, shape: tuple[int, ...], *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> torch.Tensor:
        tensor, shape = self._tensors.get(name), shape if part is None else part.shape_of(shape)
        if tensor is None or tuple(tensor.shape) != shape or tensor.dtype != self.dtype:
            raise ValueError(f"{name}: not {self.dtype} {list(shape)}")
        self.bytes += tensor.nbytes
        return tensor

    def linear(
        self,
        name: str,
        shape: tuple[int, int],
        read: Callable[[], torch.Tensor],
        read_bias: Callable[[], torch.Tensor | None],
        pieces: Sequence[Piece] = (),
        scale: float = 1.0,
    ) -> Linear:
        parts = {part: self._tensors.get(f"{name}.{part}") for part in ("codes", "scales", "shifts", "bias")}
        quantized = ck.QuantizedWeight.of({k: v for k, v in parts.items() if v is not None}, *shape)
        self.bytes += quantized.nbytes
        return ck.prepare_quantized_linear(quantized, wide=_is_wide(name))


def quantized_decoder(
    config: DecoderConfig,
    source: TensorSource,
    dtype: torch.dtype,
    scheme: str,
    store: PreparedStore | None,
    max_model_len: int | None,
    ranks: Ranks = ALONE,
) -> tuple[Decoder, str]:
    """A decoder with quantised layers on the CPU: from prepared weights, or made now and kept for the next start.

    Returns it and, for the log, how it came about. ModelLoadError as for ``Decoder``.
    """
    files = source.files()
    if store is None or not files:
        now = QuantizingWeights(source, config, _CPU, dtype, ranks)
        return Decoder(config, now, max_model_len=max_model_len), _NOW
    place = () if ranks.size == 1 else ((ranks.rank, ranks.size),)
    key = weights_key(files, scheme, LAYOUT_VERSION, dtype, config, *place, root=store.root)
    tensors = store.load(key)
    if tensors is not None:
        try:
            weights = PreparedWeights(tensors, config, dtype, ranks)
            return Decoder(config, weights, max_model_len=max_model_len), ", quantised before"
        except ValueError as error:
            _log.warning(
                "the prepared weights in %s are not this model's (%s): preparing them again", store.root, error
            )
    made = QuantizingWeights(source, config, _CPU, dtype, ranks)
    decoder = Decoder(config, made, max_model_len=max_model_len)
    return decoder, _NOW + (" and kept" if store.save(key, made.made) else "")
