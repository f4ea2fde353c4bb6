"""Safetensors: whole, sharded, in other types; little memory; damaged or foreign checkpoints are refused in words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tests.models.harness import SIZES, load, logits_in_chunks, random_ids, random_model, save

from carousel.models.errors import ModelLoadError
from carousel.models.weights import open_safetensors


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(random_model(tf.LlamaConfig(**SIZES)), tmp_path / "model")


def test_sharded_equals_single(directory: Path, tmp_path: Path) -> None:
    model = random_model(tf.LlamaConfig(**SIZES))
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    ids = random_ids(20)
    single, sharded = (logits_in_chunks(load(path), ids, [20]) for path in (directory, tmp_path / "shards"))
    assert torch.equal(single, sharded)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_are_converted(directory: Path, dtype: torch.dtype) -> None:
    file = directory / "model.safetensors"
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file)
    source = open_safetensors(directory)
    out = torch.empty(source.shapes()["layers.1.mlp.down_proj.weight"])
    source.read("layers.1.mlp.down_proj.weight", out, scale=2.0, offset=1.0)
    torch.testing.assert_close(out, tensors["model.layers.1.mlp.down_proj.weight"].float() * 2 + 1)


def test_an_odd_offset_is_read_right(tmp_path: Path) -> None:
    """Nothing in the format aligns tensors; a header of odd length shifts all of them."""
    values = torch.arange(6, dtype=torch.float32)
    header = json.dumps({"model.norm.weight": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]}}).encode()
    header += b" " * ((1 - len(header)) % 4)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    out = torch.empty(6)
    open_safetensors(tmp_path).read("norm.weight", out)
    assert torch.equal(out, values)


def test_a_copy_in_another_layout_beside_the_checkpoint_is_ignored(directory: Path) -> None:
    save_file({"tok_embeddings.weight": torch.ones(3)}, directory / "consolidated.safetensors")
    assert "tok_embeddings.weight" not in open_safetensors(directory).shapes()
    load(directory)


Change = Callable[[dict[str, torch.Tensor]], None]


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.2.self_attn.k_proj.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.self_attn.sinks"] = torch.ones(4)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(31)


def _quantise(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"layers\.2\.self_attn\.k_proj\.weight is missing \(it has layers\.0\.self_attn\.k_proj\.weight\)"),
        (_add, r"1 unexpected tensors \(layers\.2\.self_attn\.sinks\)"),
        (_reshape, r"norm\.weight has shape \[31\], the config asks for \[32\]"),
        (_quantise, r"norm\.weight has dtype I8, supported: F64, F32, F16, BF16"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_with_tensor_and_file(
    directory: Path, change: Change, message: str
) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors: .*{message}"):
        load(directory)


def test_damaged_files_are_refused_with_what_is_wrong(directory: Path) -> None:
    file = directory / "model.safetensors"
    whole = file.read_bytes()
    cases = {
        "truncated: has": whole[:-1],
        "not a safetensors file, or truncated": b"\xff" * 16,
        "its header is cut off": whole[:5],
        "not valid JSON": whole[:8] + b"x" + whole[9:],
    }
    for message, data in cases.items():
        file.write_bytes(data)
        with pytest.raises(ModelLoadError, match=rf"model\.safetensors: .*{message}.*download it again"):
            load(directory)


def test_missing_weights_are_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no weights \(\*\.safetensors or \*\.gguf\) found"):
        open_safetensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelLoadError, match=r"pickled \(pytorch_model\.bin\).*safetensors"):
        open_safetensors(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"1 of the 1 shards.*model-00001-of-00002\.safetensors"):
        open_safetensors(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelLoadError, match=r"index\.json: not a valid weight index"):
        open_safetensors(tmp_path)


MEASURE = """
import json, sys
from pathlib import Path
import torch
import carousel_kernels as ck
from carousel.models.decoder import Decoder
from carousel.models.families import decoder_config
from carousel.models.weights import open_safetensors, trim_heap

def status(field):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(field + ":"))
    return int(line.split()[1]) * 1024

directory = Path(sys.argv[1])
torch.set_num_threads(1)
config = decoder_config(json.loads((directory / "config.json").read_text()))
# What the libraries take for themselves, and their choice for each shape, once per process.
for rows, columns in ((1152, 768), (768, 768), (6144, 768), (768, 3072), (2048, 768)):
    ck.prepare_linear(torch.ones(rows, columns))
trim_heap()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
before = status("VmRSS")
decoder = Decoder(config, open_safetensors(directory))
print((status("VmHWM") - before) / decoder.weight_bytes, decoder.weight_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_of_a_load_is_little_more_than_the_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    config = tf.LlamaConfig(
        **SIZES
        | {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "vocab_size": 2048,
        }
    )
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(config)
    save_file(
        {name: torch.full(t.shape, 0.01, dtype=dtype) for name, t in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    config.save_pretrained(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""},
    )
    ratio, size = (float(x) for x in result.stdout.split())
    assert size > 200e6
    assert 0.9 < ratio <= 1.3
