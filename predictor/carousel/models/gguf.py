"""GGUF files: metadata, the config it amounts to, and the tensors under canonical names.

The reader is its own because the ``gguf`` package takes two seconds over the vocabulary alone; this one walks the
header in a tenth of one. What llama.cpp's converter changed is undone here: the order of the rows of q and k (llama,
granite, smollm3) and the names; Gemma's norms stay as they are stored, with their 1 already added.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .dequantize import dequantize_into, tensor_bytes
from .errors import ModelLoadError
from .files import check_regular
from .parallel import Part
from .weights import drop_pages

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# What a header may ask for; real ones have a fortieth of it. A vocabulary takes most: 262,144 tokens, scores and types.
MAX_HEADER_BYTES = 256 * 2**20
MAX_STRING_BYTES = 16 * 2**20
MAX_VALUES = 1 << 22
MAX_PAIRS = 1 << 16
MAX_TENSORS = 1 << 17
_MAX_DIMS, _MAX_DEPTH = 4, 4
_MAX_PARTS = 1000
_SPLIT = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")

_PERMUTED = {"llama", "granite", "smollm3"}
_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "granite": "granite",
    "smollm3": "smollm3",
}
_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class _TensorInfo(NamedTuple):
    shape: tuple[int, ...]
    ggml_type: int
    begin: int
    end: int


class _Header:
    """A cursor over the mapped header. Whatever the file claims, nothing beyond its own bytes and the limits is read.

    Raises:
        struct.error: the file ends too early, or asks for what no real file does.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self.map = mapped
        self.end = min(len(mapped), MAX_HEADER_BYTES)
        self.at = 0
        self.values_left = MAX_VALUES

    def unpack(self, form: str) -> tuple[Any, ...]:
        size = struct.calcsize("<" + form)
        if size > self.end - self.at:
            raise struct.error("the file ends inside its header")
        values = struct.unpack_from("<" + form, self.map, self.at)
        self.at += size
        return values

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """As ``string``, without a call for each: vocabularies have hundreds of thousands."""
        data, at, end, values = self.map, self.at, self.end, []
        length_at = struct.Struct("<Q").unpack_from
        for _ in range(count):
            start = at + 8
            if start > end:
                raise struct.error("the file ends inside a list of strings")
            length = length_at(data, at)[0]
            at = start + length
            if length > MAX_STRING_BYTES or at > end:
                raise struct.error(f"a string of {length} bytes")
            values.append(data[start:at].decode("utf-8", "replace"))
        self.at = at
        return values

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.unpack("IQ")
            self.values_left -= count
            if self.values_left < 0 or depth > _MAX_DEPTH:
                raise struct.error(f"a list of {count} values" if depth <= _MAX_DEPTH else "lists in lists in lists")
            if element == _STRING:
                return self.strings(count)
            if element == _ARRAY:
                return [self.value(_ARRAY, depth + 1) for _ in range(count)]
            return list(self.unpack(f"{count}{_SCALARS[element]}"))
        return self.unpack(_SCALARS[kind])[0]


class _GGUFFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = check_regular(path)
        try:
            with path.open("rb") as file:
                magic = file.read(4)
                if magic != b"GGUF":
                    raise ModelLoadError(f"{path}: not a GGUF file (it starts with {magic!r}); check the path")
                self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelLoadError(f"{path}: cannot be read ({error.strerror}); check the path and its mode") from error
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, KeyError, OverflowError, MemoryError) as error:
            what = f"unknown type {error}" if isinstance(error, KeyError) else error
            raise ModelLoadError(
                f"{path}: its GGUF header is damaged or truncated ({what}); download it again"
            ) from error
        self._check_places()

    def _check_places(self) -> None:
        """Every tensor lies within the file, where no other does."""
        end = max((info.end for info in self.tensors.values()), default=0)
        if end > self.size:
            raise ModelLoadError(
                f"{self.path}: truncated: has {self.size} bytes, its header asks for {end}; download it again"
            )
        taken = 0
        for name, info in sorted(self.tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
            if info.begin < taken:
                raise ModelLoadError(
                    f"{self.path}: tensor {_short(name)} overlaps another; its header is damaged, download it again"
                )
            taken = max(taken, info.end)

    def _parse(self) -> tuple[dict[str, Any], dict[str, _TensorInfo]]:
        head = _Header(self.map)
        head.at = 4
        (version,) = head.unpack("I")
        if version not in (2, 3):
            raise ModelLoadError(
                f"{self.path}: GGUF version {version} (big-endian if huge) is not supported, 2 and 3 are; convert it "
                "with a current llama.cpp"
            )
        tensor_count, pair_count = head.unpack("QQ")
        if tensor_count > MAX_TENSORS or pair_count > MAX_PAIRS:
            raise struct.error(f"{tensor_count} tensors and {pair_count} metadata fields")
        metadata: dict[str, Any] = {}
        for _ in range(pair_count):
            key = head.string()
            (kind,) = head.unpack("I")
            if key in metadata:
                raise struct.error(f"the field {_short(key)} is there twice")
            metadata[key] = head.value(kind)
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensor_count):
            name = head.string()
            (dims,) = head.unpack("I")
            if dims > _MAX_DIMS or name in entries:
                what = f"has {dims} dimensions" if dims > _MAX_DIMS else "is there twice"
                raise struct.error(f"the tensor {_short(name)} {what}")
            shape = tuple(reversed(head.unpack(f"{dims}Q")))
            entries[name] = (shape, *head.unpack("IQ"))
        grain = metadata.get("general.alignment", 32)
        if not isinstance(grain, int) or not 8 <= grain <= 2**20 or grain % 8:
            raise struct.error(f"general.alignment is {_short(grain)}")
        start = -(-head.at // grain) * grain
        return metadata, {name: self._place(name, start, grain, *entry) for name, entry in entries.items()}

    def _place(
        self, name: str, start: int, grain: int, shape: tuple[int, ...], ggml_type: int, offset: int
    ) -> _TensorInfo:
        if offset % grain:
            raise struct.error(f"the tensor {_short(name)} is not aligned")
        try:
            row = tensor_bytes(ggml_type, shape[-1]) if shape else 0
            size = row * prod(shape[:-1]) if shape else tensor_bytes(ggml_type, 1)
        except (ValueError, KeyError, ImportError) as error:
            raise ModelLoadError(
                f"{self.path}: tensor {_short(name)} has quantisation type {ggml_type}, which is not supported for its "
                f"shape {list(shape)} ({error}); use a Q4_K_M, Q8_0 or F16 file"
            ) from error
        return _TensorInfo(shape, ggml_type, start + offset, start + offset + size)


def _short(value: object) -> str:
    text = str(value)
    return repr(text if len(text) <= 60 else text[:59] + "…")


def split_files(path: Path) -> list[Path]:
    """All parts of the split file that ``path`` is one of, in order; else just ``path``.

    ModelLoadError, naming them, if parts are missing.
    """
    match = _SPLIT.match(path.name)
    if match is None:
        return [path]
    stem, _, count = match.groups()
    if not 0 < int(count) <= _MAX_PARTS:
        raise ModelLoadError(f"{path}: its name says {int(count)} parts, 1 to {_MAX_PARTS} make sense; rename it")
    parts = [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelLoadError(
            f"{path}: {len(missing)} of its {len(parts)} parts are missing ({', '.join(missing[:3])}); "
            "finish the download"
        )
    return parts


class GGUFSource:
    """A GGUF file, split or not, as a ``TensorSource``. ``metadata`` is the (first) file's, as plain Python values."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = [_GGUFFile(part) for part in split_files(path)]
        self.metadata = self._files[0].metadata
        self.architecture = str(self.metadata.get("general.architecture"))
        self._raw = {name: (file, info) for file in self._files for name, info in file.tensors.items()}
        gemma = self.architecture.startswith("gemma")
        self._names = {
            _canonical(name, self.architecture, gemma): name for name in self._raw if name not in _ROPE_TENSORS
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._raw[raw][1].shape for name, raw in self._names.items()}

    def where(self, name: str) -> str:
        return str(self._raw[self._names[name]][0].path)

    def files(self) -> list[Path]:
        return [file.path for file in self._files]

    def rope_divisors(self, kind: str) -> list[float]:
        """The tensor rope_<kind>, [rotary_dim / 2], or an empty list."""
        name = f"rope_{kind}.weight"
        if name not in self._raw:
            return []
        out = torch.empty(self._raw[name][1].shape)
        self._read(name, out, 1.0, 0.0, None)
        values: list[float] = out.tolist()
        return values

    def read(
        self, name: str, out: torch.Tensor, *, scale: float = 1.0, offset: float = 0.0, part: Part | None = None
    ) -> None:
        """Parts of rows are read as whole rows: they are packed in groups of columns."""
        heads, raw = self._permuted_heads(name), self._names[name]
        shape = self._raw[raw][1].shape
        if part is not None and part.dim > 0:
            whole = torch.empty(shape)
            self.read(name, whole, scale=scale, offset=offset)
            out.copy_(part.of(whole))
        elif heads:
            # The converter put the two halves of each head's rows side by side: pairs, as llama.cpp rotates them.
            half = shape[0] // heads // 2
            stored = torch.empty(out.shape)
            self._read(raw, stored, scale, offset, part)
            pairs = stored.unflatten(0, (-1, half, 2))
            out.unflatten(0, (-1, 2, half)).transpose(1, 2).copy_(pairs)
        else:
            self._read(raw, out, scale, offset, part)

    def complete(self) -> None:
        pass

    def _permuted_heads(self, name: str) -> int:
        """How many heads' rows the converter permuted in this tensor; 0 for none."""
        if self.architecture not in _PERMUTED:
            return 0
        heads = self.metadata.get(f"{self.architecture}.attention.head_count", 0)
        if ".q_proj." in name:
            return int(heads)
        if ".k_proj." in name:
            return int(self.metadata.get(f"{self.architecture}.attention.head_count_kv", heads))
        return 0

    def _read(self, raw: str, out: torch.Tensor, scale: float, offset: float, rows: Part | None) -> None:
        file, info = self._raw[raw]
        begin, end = info.begin, info.end
        if rows is not None:
            size = (end - begin) // info.shape[0]
            begin, end = begin + rows.begin * size, begin + rows.end * size
        data = torch.frombuffer(file.map, dtype=torch.uint8, offset=begin, count=end - begin)
        dequantize_into(data, info.ggml_type, out, scale, offset)
        drop_pages(file.map, begin, end)


_LEAVES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TOP = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}


def _canonical(name: str, architecture: str, gemma: bool) -> str:
    parts = name.split(".")
    if len(parts) == 2:
        return f"{_TOP.get(parts[0], parts[0])}.{parts[1]}"
    if len(parts) != 4 or parts[0] != "blk":
        return name
    leaf = _LEAVES.get(parts[2], parts[2])
    if gemma and parts[2] == "ffn_norm":
        leaf = "pre_feedforward_layernorm"
    if architecture == "phi3" and parts[2] == "ffn_up":
        leaf = "mlp.gate_up_proj"
    return f"layers.{parts[1]}.{leaf}.{parts[3]}"


def _rope_scaling(source: GGUFSource, get: Any) -> dict[str, Any]:
    scaling: dict[str, Any] = {}
    kind = get("rope.scaling.type", "none")
    factor = get("rope.scaling.factor") or get("rope.scale_linear")
    if kind == "linear" or (kind == "none" and get("rope.scale_linear")):
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        scaling = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": get("rope.scaling.original_context_length"),
            "beta_fast": get("rope.scaling.yarn_beta_fast"),
            "beta_slow": get("rope.scaling.yarn_beta_slow"),
        }
    long, short = source.rope_divisors("factors_long"), source.rope_divisors("factors_short")
    if long and short:
        scaling = {
            "rope_type": "longrope",
            "long_factor": long,
            "short_factor": short,
            "attention_factor": get("rope.scaling.attn_factor"),
        }
    divisors = source.rope_divisors("freqs")
    if divisors:  # Llama 3's scaling, worked out by the converter
        scaling["frequency_divisors"] = divisors
    return {key: value for key, value in scaling.items() if value is not None}


def hf_config(source: GGUFSource) -> dict[str, Any]:
    """The metadata as a Hugging Face config dict, for ``families.decoder_config``.

    Of an architecture without a counterpart only ``architectures`` is set, to its GGUF name, which is then refused.
    """
    architecture = source.architecture
    model_type = _MODEL_TYPES.get(architecture)
    if model_type is None:
        return {"architectures": [f"{architecture} (GGUF)"]}

    def get(key: str, default: Any = None) -> Any:
        return source.metadata.get(f"{architecture}.{key}", default)

    shapes = source.shapes()
    heads, hidden = get("attention.head_count"), get("embedding_length")
    if "embed_tokens.weight" not in shapes or not isinstance(heads, int) or not isinstance(hidden, int):
        raise ModelLoadError(
            f"{source.path}: token_embd.weight, {architecture}.attention.head_count or {architecture}.embedding_length "
            "is missing, or is a list; use a whole language model whose layers are all of one size"
        )
    head_dim = get("attention.key_length") or hidden // heads
    config: dict[str, Any] = {
        "model_type": model_type,
        "vocab_size": shapes["embed_tokens.weight"][0],
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_theta": get("rope.freq_base"),
        "partial_rotary_factor": get("rope.dimension_count", head_dim) / head_dim,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "layers.0.self_attn.q_proj.bias" in shapes,
        "rope_scaling": _rope_scaling(source, get) or None,
        "original_max_position_embeddings": get("rope.scaling.original_context_length"),
        "sliding_window": get("attention.sliding_window") or None,  # Phi-4's files say 0 for none
        "embedding_multiplier": get("embedding_scale"),
        "residual_multiplier": get("residual_scale"),
        "attention_multiplier": get("attention.scale"),
        "logits_scaling": get("logit_scale"),
        "attn_logit_softcapping": get("attn_logit_softcapping"),
        "final_logit_softcapping": get("final_logit_softcapping"),
    }
    if model_type.startswith("gemma"):
        # The two 27B models scale by the width per head; the metadata does not say so, nor does llama.cpp's.
        wide = (model_type, config["num_hidden_layers"]) in (("gemma2", 46), ("gemma3_text", 62))
        config["query_pre_attn_scalar"] = hidden // heads if wide else head_dim
        config["rope_local_base_freq"] = get("rope.freq_base_swa")
    return config


_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>", "<|eom_id|>")


def eos_ids(metadata: Mapping[str, Any]) -> set[int]:
    """Ids that end a generation: those the metadata names, and control tokens that are known to end a turn."""
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    given = [metadata[f"tokenizer.ggml.{key}"] for key in keys if f"tokenizer.ggml.{key}" in metadata]
    if wrong := [value for value in given if type(value) is not int]:
        raise ValueError(f"{keys[0]}, {keys[1]} or {keys[2]} is {_short(wrong[0])}, not a token id")
    ids = set(given)
    tokens, types = metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ())
    control = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=False)) if kind == 3}
    return ids | {control[token] for token in _TURN_ENDS if token in control}
