"""A small good model in both formats, and what hostile ones look like. Run as a script: load many under hard limits."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
GOOD_CONFIG = json.dumps(CONFIG)


def write_directory(directory: Path) -> Path:
    """The tests' tiny model as a Hugging Face directory."""
    from safetensors.torch import save_file
    from tests.engine.tiny import _config, _weights, byte_tokenizer

    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(GOOD_CONFIG)
    (directory / "generation_config.json").write_text('{"eos_token_id": 256}')
    (directory / "tokenizer_config.json").write_text('{"eos_token": "<|end|>", "chat_template": "{{ messages }}"}')
    byte_tokenizer().backend.save(str(directory / "tokenizer.json"))
    save_file(_weights(_config()), directory / "model.safetensors")
    return directory


def write_gguf(path: Path) -> Path:
    """The same as a GGUF file with a vocabulary of letters."""
    import numpy as np
    from tests.engine.tiny import _config, _weights
    from tests.models.gguf_files import letters, write

    leaves = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    top = {"model.embed_tokens.weight": "token_embd.weight", "lm_head.weight": "output.weight"}
    top["model.norm.weight"] = "output_norm.weight"
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in _weights(_config()).items():
        if name in top:
            tensors[top[name]] = tensor.numpy()
        else:
            layer, leaf = name.removeprefix("model.layers.").removesuffix(".weight").split(".", 1)
            tensors[f"blk.{layer}.{leaves[leaf]}.weight"] = tensor.numpy()
    metadata: dict[str, Any] = {
        "llama.context_length": 512, "llama.embedding_length": 32, "llama.block_count": 2,
        "llama.feed_forward_length": 64, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
    }  # fmt: skip
    return write(path, "llama", metadata | letters(320), tensors)


# ---- raw GGUF


def text(value: str | bytes, length: int | None = None) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw


def head(*parts: bytes, tensors: int = 0, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + b"".join(parts)


def pair(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int, offset: int) -> bytes:
    return (
        text(name)
        + struct.pack("<I", len(shape))
        + struct.pack(f"<{len(shape)}Q", *shape)
        + struct.pack("<IQ", kind, offset)
    )


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + raw


HUGE = 2**60
BODY = b"\x00" * 4096
GGUF = {
    "empty": b"",
    "magic only": b"GGUF",
    "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "2**60 tensors": head(tensors=HUGE),
    "2**60 pairs": head(pairs=HUGE),
    "2**64-1 of both": head(tensors=2**64 - 1, pairs=2**64 - 1),
    "key of 2**60 bytes": head(text("k", HUGE), pairs=1),
    "key of 2**64-1 bytes": head(text("k", 2**64 - 1), pairs=1),
    "string of 2**60 bytes": head(pair("k", 8, text("v", HUGE)), BODY, pairs=1),
    "string past the end": head(pair("k", 8, text("v", 5000)), BODY, pairs=1),
    "type 99": head(pair("k", 99, b""), BODY, pairs=1),
    "list of type 99": head(pair("k", 9, array(99, 1)), BODY, pairs=1),
    "list of 2**60 numbers": head(pair("k", 9, array(4, HUGE)), BODY, pairs=1),
    "list of 2**60 bytes": head(pair("k", 9, array(0, HUGE)), BODY, pairs=1),
    "list of 2**63 strings": head(pair("k", 9, array(8, 2**63)), BODY, pairs=1),
    "list of 2**63 lists": head(pair("k", 9, array(9, 2**63)), BODY, pairs=1),
    "last string of a list past the end": head(pair("k", 9, array(8, 2, text("a") + text("b", HUGE))), BODY, pairs=1),
    "lists nested 10,000 deep": head(pair("k", 9, array(9, 1) * 10_000), BODY, pairs=1),
    "a field twice": head(pair("k", 0, b"\x01"), pair("k", 0, b"\x01"), BODY, pairs=2),
    "a tensor twice": head(tensor("t", [8], 0, 0), tensor("t", [8], 0, 32), BODY, tensors=2),
    "tensor of 2**31 dimensions": head(text("t") + struct.pack("<I", 2**31), BODY, tensors=1),
    "tensor of 5 dimensions": head(tensor("t", [1] * 5, 0, 0), BODY, tensors=1),
    "tensor of 2**63 elements": head(tensor("t", [2**63], 0, 0), BODY, tensors=1),
    "tensor of 2**240 elements": head(tensor("t", [2**60] * 4, 0, 0), BODY, tensors=1),
    "tensor at 2**63": head(tensor("t", [8], 0, 2**63), BODY, tensors=1),
    "tensor at 2**64-1": head(tensor("t", [8], 0, 2**64 - 1), BODY, tensors=1),
    "tensor not aligned": head(tensor("t", [8], 0, 3), BODY, tensors=1),
    "tensors that overlap": head(tensor("t", [64], 0, 0), tensor("u", [8], 0, 32), BODY, tensors=2),
    "tensor of type 255": head(tensor("t", [8], 255, 0), BODY, tensors=1),
    "tensor of broken blocks": head(tensor("t", [33], 8, 0), BODY, tensors=1),
    "alignment 0": head(pair("general.alignment", 4, struct.pack("<I", 0)), BODY, pairs=1),
    "alignment 7": head(pair("general.alignment", 4, struct.pack("<I", 7)), BODY, pairs=1),
    "alignment text": head(pair("general.alignment", 8, text("x")), tensor("t", [8], 0, 0), BODY, tensors=1, pairs=1),
    "alignment -8": head(pair("general.alignment", 11, struct.pack("<q", -8)), BODY, tensors=0, pairs=1),
    "no metadata": head(BODY),
    "architecture is a number": head(pair("general.architecture", 0, b"\x07"), BODY, pairs=1),
    "a million tiny fields": head(b"".join(pair(str(i), 0, b"\0") for i in range(70_000)), pairs=70_000),
}  # fmt: skip

# ---- raw safetensors


def tensors_file(header: bytes | str | dict[str, Any], body: bytes = b"", length: int | None = None) -> bytes:
    raw = json.dumps(header) if isinstance(header, dict) else header
    raw = raw.encode() if isinstance(raw, str) else raw
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def entry(begin: Any = 0, end: Any = 4, shape: Any = (1,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


SAFETENSORS = {
    "empty": b"",
    "three bytes": b"abc",
    "header of 2**63": tensors_file("{}", length=2**63),
    "header of 2**64-1": tensors_file("{}", length=2**64 - 1),
    "header past the end": tensors_file("{}", length=100),
    "not JSON": tensors_file("x" * 100),
    "not UTF-8": tensors_file(b"\xff" * 100),
    "UTF-16": tensors_file("{}".encode("utf-16")),
    "a list": tensors_file("[]"),
    "a number": tensors_file("3"),
    "deep nesting": tensors_file("[" * 200_000),
    "deep objects": tensors_file('{"a":' * 200_000),
    "entry is a list": tensors_file({"a": []}),
    "entry is null": tensors_file({"a": None}),
    "entry is text": tensors_file({"a": "data_offsets"}),
    "no offsets": tensors_file({"a": {"dtype": "F32", "shape": [1]}}),
    "offsets are text": tensors_file({"a": entry("0", "4")}, b"\0" * 4),
    "offsets are floats": tensors_file({"a": entry(0.0, 4.0)}, b"\0" * 4),
    "offsets are true": tensors_file({"a": entry(False, True)}, b"\0" * 4),
    "three offsets": tensors_file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]}}, b"\0" * 4),
    "negative offset": tensors_file({"a": entry(-4, 0)}, b"\0" * 4),
    "backward offsets": tensors_file({"a": entry(4, 0)}, b"\0" * 4),
    "offset past the end": tensors_file({"a": entry(0, 2**62, (2**60,))}, b"\0" * 4),
    "overlap": tensors_file({"a": entry(), "b": entry(2, 6)}, b"\0" * 8),
    "same place": tensors_file({"a": entry(), "b": entry()}, b"\0" * 4),
    "shape larger than data": tensors_file({"a": entry(0, 4, (2**40,))}, b"\0" * 4),
    "shape smaller than data": tensors_file({"a": entry(0, 8, (1,))}, b"\0" * 8),
    "negative shape": tensors_file({"a": entry(0, 4, (-1, -1))}, b"\0" * 4),
    "shape is text": tensors_file({"a": entry(shape="x")}, b"\0" * 4),
    "shape is null": tensors_file({"a": entry(shape=None)}, b"\0" * 4),
    "shape of zeros": tensors_file({"model.embed_tokens.weight": entry(0, 0, (0, 2**60))}),
    "dtype is a number": tensors_file({"a": entry(dtype=3)}, b"\0" * 4),
    "unknown dtype": tensors_file({"model.embed_tokens.weight": entry(dtype="F3")}, b"\0" * 4),
    "a name twice": tensors_file('{"a": %s, "a": %s}' % ((json.dumps(entry()),) * 2), b"\0" * 4),
    "no tensors": tensors_file("{}"),
    "integers of 5,000 digits": tensors_file('{"a": {"dtype": "F32", "shape": [' + "9" * 5000 + "]}}"),
}  # fmt: skip

# ---- configs

_ABSURD = (0, -1, 2**40, 2**63, 10**400, 1.5, True, "x", [], {}, float("nan"), float("inf"), -float("inf"))
_NAMES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_NAMES += ("num_key_value_heads", "head_dim", "max_position_embeddings")
_FACTORS = ("rope_theta", "partial_rotary_factor", "rms_norm_eps")
_SCALINGS = [
    *(
        "x",
        3,
        [1],
        {"rope_type": "x"},
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": [1]},
    ),
    *({"rope_type": "linear", "factor": value} for value in (-1, float("nan"), float("inf"), "x", [], 10**400)),
    *({"rope_type": "yarn", "factor": 2, "original_max_position_embeddings": value} for value in (-1, "x", 2**70)),
    {"rope_type": "longrope", "short_factor": [0.0] * 4, "long_factor": [1.0] * 4, "factor": 1},
    {"rope_type": "longrope", "short_factor": "x", "long_factor": 3, "factor": 1},
    {"rope_type": "llama3", "factor": 8, "low_freq_factor": 0, "high_freq_factor": "x"},
]
CONFIGS: dict[str, str] = {
    "empty": "", "not JSON": "{", "a list": "[]", "null": "null", "deep": "[" * 200_000, "an empty object": "{}",
    "deep object": '{"a":' * 100_000, "digits": '{"vocab_size": ' + "9" * 5000 + "}", "not UTF-8": "\udcff",
    "architectures is text": json.dumps(CONFIG | {"architectures": "x" * 1000, "model_type": None}),
    "architectures of numbers": json.dumps(CONFIG | {"architectures": [1], "model_type": None}),
    "architectures of lists": json.dumps(CONFIG | {"architectures": [[]], "model_type": []}),
    "model_type is a list": json.dumps(CONFIG | {"model_type": ["llama"]}),
    "model_type is an object": json.dumps(CONFIG | {"model_type": {}, "architectures": None}),
    "hidden_act is a list": json.dumps(CONFIG | {"hidden_act": ["silu"]}),
    "heads do not divide": json.dumps(CONFIG | {"num_key_value_heads": 3}),
    "layer_types is short": json.dumps(CONFIG | {"model_type": "qwen3", "layer_types": ["full_attention"]}),
    "layer_types of lists": json.dumps(CONFIG | {"model_type": "qwen3", "layer_types": [[], []]}),
    "window is text": json.dumps(CONFIG | {"model_type": "mistral", "sliding_window": "x"}),
    "pattern 0": json.dumps(CONFIG | {"model_type": "gemma3_text", "sliding_window_pattern": 0}),
}  # fmt: skip
CONFIGS |= {f"{name}={value!s:.12}": json.dumps(CONFIG | {name: value}) for name in _NAMES for value in _ABSURD}
CONFIGS |= {f"{name}={value!s:.12}": json.dumps(CONFIG | {name: value}) for name in _FACTORS for value in _ABSURD[4:]}
CONFIGS |= {f"rope {i}": json.dumps(CONFIG | {"rope_scaling": scaling}) for i, scaling in enumerate(_SCALINGS)}
# Means what the default means, or is taken for what it says.
for name in ("rms_norm_eps=1.5", "rope_theta=1.5", "rope_theta=1099511627776", "rms_norm_eps=1099511627776"):
    CONFIGS.pop(name, None)


def cases(good: Path, work: Path) -> Iterator[tuple[str, Path]]:
    """(name, path to load) of every hostile model; each path is overwritten by the next of its kind."""
    file = work / "hostile.gguf"
    for name, raw in GGUF.items():
        file.write_bytes(raw)
        yield f"gguf: {name}", file
    weights = good / "model.safetensors"
    whole = weights.read_bytes()
    for name, raw in SAFETENSORS.items():
        weights.write_bytes(raw)
        yield f"safetensors: {name}", good
    weights.write_bytes(whole)
    for name, config in CONFIGS.items():
        (good / "config.json").write_text(config, errors="surrogateescape")
        yield f"config: {name}", good
    (good / "config.json").write_text(GOOD_CONFIG)


def main(good: Path, work: Path, headroom_bytes: int) -> None:
    """Load every case with little more memory than the imports took; print what was raised."""
    import resource

    from carousel.models.errors import ModelLoadError
    from carousel.models.loader import load_model

    load_model(good)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + headroom_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (120, 120))
    for name, path in cases(good, work):
        try:
            load_model(path)
            said = "LOADED"
        except ModelLoadError as error:
            said = str(error)
        except BaseException as error:
            said = f"RAISED {type(error).__name__}: {error}"
        print(json.dumps([name, said[:500]]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
