"""From a path to a model that is ready to serve: finds out what lies there, reads config, weights and tokenizer."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import carousel_kernels as ck
from carousel_kernels.cpu import half

from .decoder import Decoder
from .errors import ModelLoadError, UnsupportedModel
from .families import DecoderConfig, decoder_config
from .gguf import GGUFSource, hf_config, split_files
from .packed import PackedSource, PackedWeights, scheme_of_checkpoint
from .parallel import ALONE, Ranks
from .prepared import PreparedStore
from .quantization import HALF, quantized_decoder, scheme_of
from .staging import StagedSource
from .tokenizer import Tokenizer, load_gguf_tokenizer, load_tokenizer, read_json
from .weights import DecoderWeights, SafetensorsSource, TensorSource, open_safetensors

if TYPE_CHECKING:
    from carousel.engine.ranks import RankGroup

__all__ = ["LoadedModel", "ModelLoadError", "UnsupportedModel", "load_model"]

_log = logging.getLogger(__name__)

_KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model, ready to compute.

    ``generation_defaults`` are the model's generation_config (temperature, top_p, ...), {} if it has none;
    ``max_model_len`` is the longest context in tokens that it is meant (or was asked) to serve; ``ranks`` have the rest
    of the decoder, where it is split.
    """

    decoder: Decoder
    tokenizer: Tokenizer
    generation_defaults: dict[str, Any]
    architecture: str
    path: Path
    max_model_len: int
    ranks: RankGroup | None = None


def load_model(
    path: Path | str,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    quantization: str = "none",
    cache_dir: Path | str | None = None,
    max_model_len: int | None = None,
    deterministic: bool = False,
    kv_dtype: str = "auto",
    ranks: Ranks | None = None,
    log: Callable[[str], None] = _log.info,
) -> LoadedModel:
    """Load a model directory (config.json, safetensors, tokenizer), a GGUF file, or a directory with one GGUF.

    Args:
        path: where it lies. Any part of a split GGUF stands for all.
        device: where the weights go.
        dtype: "float32", "bfloat16", "float16" or "auto": bfloat16 on a GPU, and on a CPU that has instructions for it
            (AVX512-BF16) where the checkpoint is bfloat16 as well; else float32. On the CPU bfloat16 is that of the
            linear layers, between activations in float32.
        quantization: "none", "int8" (linear layers in 8 bits, on the CPU only) or "auto": none.
        cache_dir: where prepared weights and measurements are kept; it may be read-only. None: nowhere.
        max_model_len: the longest context to serve, in tokens; None for the model's own. Beyond the model's
            original length it stretches RoPE where that depends on the length (dynamic, longrope).
        deterministic: linear layers whose result for a row does not depend on the other rows, to the last bit; not on
            the CPU.
        kv_dtype: of cached keys and values: "auto", that of the activations, or bfloat16 beside int8 and bfloat16
            weights on a CPU; "float32" or "bfloat16", on a CPU; or "fp8", on a GPU.
        ranks: among whom the decoder is split; None: it is whole.
        log: receives one line on what was loaded.

    Raises:
        ModelLoadError: naming the file, the cause and what to try.
        UnsupportedModel (a ModelLoadError): naming the architecture and the supported ones.
        ValueError: an unknown ``dtype``; a ``quantization`` that is unknown, or does not run on the device; or
            ``deterministic`` where it does not run.
    """
    started = time.monotonic()
    path, device = Path(path), torch.device(device)
    if isinstance(dtype, str) and dtype not in ("auto", *DTYPES):
        raise ValueError(f"dtype {dtype!r} is not known; allowed: auto, {', '.join(DTYPES)}")
    scheme = scheme_of(quantization, device)
    store = PreparedStore(cache_dir) if cache_dir is not None else None
    config, source, tokenizer, defaults, stored = open_checkpoint(path, device)
    torch_dtype = _dtype(dtype, device, stored) if scheme == "none" or dtype != "auto" else _default(device)
    computed = torch_dtype
    if device.type == "cpu" and torch_dtype is torch.bfloat16:
        computed = torch.float32  # of linear layers alone: all else would be slower in bfloat16
        scheme = HALF if scheme == "none" else scheme
    measured = store.restore_choices() if store else {}
    group = ranks or ALONE
    with ck.uniform_linears() if deterministic else nullcontext(), _room(path, device):
        if scheme == "none":
            weights: TensorSource | DecoderWeights = source
            if isinstance(source, PackedSource) and device.type != "cpu":
                weights = PackedWeights(source, config, device, torch_dtype, group)
            decoder = Decoder(config, weights, device, computed, max_model_len=max_model_len, ranks=group)
            how = ""
        else:
            decoder, how = quantized_decoder(config, source, computed, scheme, store, max_model_len, group)
    decoder.kv_dtype = _KV_DTYPES.get(kv_dtype, decoder.kv_dtype)
    if store is not None:
        store.save_choices(measured)
    if isinstance(source, PackedSource):
        # A CPU has no kernel for these formats: they take the room of plain weights there.
        how = f", from {source.scheme.name}{'' if device.type != 'cpu' else ', widened'}{how}"
    if isinstance(staged := source.source if isinstance(source, PackedSource) else source, StagedSource):
        how += f"; {staged}"
    log(
        f"loaded {config.architecture} from {path} in {time.monotonic() - started:.2f} s: "
        f"{decoder.weight_bytes / 2**20:.0f} MiB of weights, {str(torch_dtype).removeprefix('torch.')} on {device}{how}"
    )
    return LoadedModel(decoder, tokenizer, defaults, config.architecture, path, decoder.max_model_len)


_Parts = tuple[DecoderConfig, TensorSource, Tokenizer, dict[str, Any], str]
"""The last: what type the config says that the weights have; "" where it does not say."""


def open_checkpoint(path: Path, device: torch.device) -> _Parts:
    """What lies at a path, before any weight is read: config, weights for a device, tokenizer, generation defaults, and
    the type that the config says the weights have.

    Raises:
        ModelLoadError, UnsupportedModel: as :func:`load_model`.
    """
    file = _find_gguf(path)
    with _damage(file or path):
        return _read_directory(path, device) if file is None else _read_gguf(file)


def _read_gguf(file: Path) -> _Parts:
    source = GGUFSource(file)
    # The converter stores Gemma's norms with their 1 added.
    config = replace(_config(hf_config(source), file), norm_offset=False)
    return config, source, load_gguf_tokenizer(source.metadata, str(file)), _gguf_defaults(source.metadata), ""


def _opened(path: Path, device: torch.device) -> SafetensorsSource | StagedSource:
    """A GPU's memory is filled by copies, which want pinned buffers; a CPU's by mapping the files."""
    source = open_safetensors(path)
    return StagedSource(source, device) if device.type == "cuda" else source


def _read_directory(path: Path, device: torch.device) -> _Parts:
    hf = read_json(path / "config.json")
    if not hf:
        raise ModelLoadError(f"{path}: no config.json and no *.gguf in it; is it a model directory?")
    config = _config(hf, path / "config.json")
    scheme = scheme_of_checkpoint(hf)
    plain = _opened(path, device)
    source: TensorSource = plain if scheme is None else PackedSource(plain, scheme)
    defaults = read_json(path / "generation_config.json")
    stored = str(hf.get("dtype") or hf.get("torch_dtype") or "")
    return config, source, load_tokenizer(path, hf, defaults), defaults, stored


_DAMAGE = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError, AssertionError),
    struct.error,
)


@contextmanager
def _damage(where: Path) -> Generator[None, None, None]:
    """What goes wrong over a model's own words is the model's fault, and said of its file."""
    try:
        yield
    except ModelLoadError:
        raise
    except _DAMAGE as error:
        raise ModelLoadError(
            f"{where}: its config, vocabulary or metadata is damaged ({type(error).__name__}: {str(error)[:200]}); "
            "download it again"
        ) from error


@contextmanager
def _room(path: Path, device: torch.device) -> Generator[None, None, None]:
    """A device's memory that does not suffice is said of the model."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelLoadError(
            f"{path}: its weights do not fit into the memory of {device}; use a larger GPU, a quantised version of the "
            "model, or several GPUs (--tensor-parallel-size)"
        ) from error


def _dtype(dtype: str | torch.dtype, device: torch.device, stored: str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cpu" and stored.removeprefix("torch.") == "bfloat16" and half.full_rate():
        return torch.bfloat16
    return _default(device)


def _default(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def _config(hf: dict[str, Any], where: Path) -> DecoderConfig:
    try:
        return decoder_config(hf)
    except UnsupportedModel:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ModelLoadError(f"{where}: {error}; the file is damaged, or its model is not supported") from error


def _find_gguf(path: Path) -> Path | None:
    """The GGUF file that ``path`` is or holds; None for a directory with a config.json."""
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ModelLoadError(f"{path}: not a model; give a model directory or a *.gguf file")
    if not path.is_dir():
        raise ModelLoadError(f"{path}: no such file or directory; check the path")
    if (path / "config.json").is_file():
        return None
    # A projector of a vision model lies beside its language model; it is not a second choice.
    files = [file for file in sorted(path.glob("*.gguf")) if "mmproj" not in file.name.lower()]
    whole = {split_files(file)[0] for file in files}
    if len(whole) > 1:
        names = ", ".join(sorted(file.name for file in whole)[:6])
        raise ModelLoadError(f"{path}: holds {len(whole)} GGUF models ({names}); give the path of one of them")
    return whole.pop() if whole else None


def _gguf_defaults(metadata: dict[str, Any]) -> dict[str, Any]:
    """Sampling defaults, where the file has them (``general.sampling.*``), in generation_config's names."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    keys = {f"general.sampling.{key}": name for key, name in names.items()}
    return {name: metadata[key] for key, name in keys.items() if key in metadata}
