"""What load_model makes of a path, and what it says when it can make nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from tests.models.harness import SIZES, logits_in_chunks, random_ids, random_model, save
from tests.models.test_tokenizer import byte_level_backend

from carousel.models import loader
from carousel.models.loader import ModelLoadError, UnsupportedModel, load_model


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    model = random_model(tf.Qwen3Config(**SIZES, head_dim=16))
    model.generation_config = tf.GenerationConfig(eos_token_id=[2, 3], do_sample=True, temperature=0.7, top_k=20)
    save(model, tmp_path / "model")
    tf.PreTrainedTokenizerFast(tokenizer_object=byte_level_backend()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_directory_gives_all_parts(directory: Path) -> None:
    lines: list[str] = []
    loaded = load_model(str(directory), log=lines.append)
    assert loaded.architecture == "Qwen3ForCausalLM"
    assert loaded.path == directory
    assert loaded.max_model_len == loaded.decoder.max_model_len == 256
    assert loaded.tokenizer.eos_ids == {2, 3}
    assert loaded.generation_defaults["temperature"] == pytest.approx(0.7)
    assert loaded.decoder.dtype == torch.float32
    assert len(lines) == 1
    assert "Qwen3ForCausalLM" in lines[0]
    model = tf.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    ids = random_ids(12)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits_in_chunks(loaded.decoder, ids, [5]), expected, atol=1e-4, rtol=1e-4)


def test_dtype_and_length_are_the_callers(directory: Path) -> None:
    lines: list[str] = []
    loaded = load_model(directory, dtype="bfloat16", max_model_len=100, log=lines.append)
    assert (loaded.decoder.dtype, loaded.max_model_len) == (torch.float32, 100)  # the layers alone are bfloat16
    assert "bfloat16 on cpu, rounded now" in lines[0]
    assert load_model(directory, dtype=torch.float16).decoder.dtype == torch.float16
    with pytest.raises(ValueError, match=r"int4.*allowed: auto, float32"):
        load_model(directory, dtype="int4")


def test_auto_takes_bfloat16_where_model_and_cpu_have_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(stored: str, **options: str) -> str:
        config = json.loads((directory / "config.json").read_text())
        config.pop("torch_dtype", None)
        (directory / "config.json").write_text(json.dumps(config | {"dtype": stored}))
        lines: list[str] = []
        load_model(directory, log=lines.append, **options)
        return lines[0].split(" MiB of weights, ")[1].split()[0]

    monkeypatch.setattr(loader.half, "full_rate", lambda: True)
    assert taken("bfloat16") == "bfloat16"
    assert taken("float32") == "float32"
    assert taken("bfloat16", quantization="int8") == "float32"
    monkeypatch.setattr(loader.half, "full_rate", lambda: False)
    assert taken("bfloat16") == "float32"


def test_a_gpu_computes_in_bfloat16_unless_told_otherwise() -> None:
    gpu = torch.device("cuda", 1)
    for stored in ("float32", "bfloat16", "float16", ""):
        assert loader._dtype("auto", gpu, stored) == torch.bfloat16
    assert loader._dtype("float16", gpu, "bfloat16") == torch.float16


def test_bfloat16_layers_stay_close_and_come_from_the_cache(directory: Path, tmp_path: Path) -> None:
    ids = random_ids(12)
    plain = logits_in_chunks(load_model(directory, dtype="float32").decoder, ids, [5])
    lines: list[str] = []
    first, second = (
        logits_in_chunks(
            load_model(directory, dtype="bfloat16", cache_dir=tmp_path / "c", log=lines.append).decoder, ids, [5]
        )
        for _ in range(2)
    )
    assert lines[0].endswith("rounded now and kept")
    assert lines[1].endswith("rounded before")
    assert torch.equal(first, second)
    assert 0 < float((first - plain).norm() / plain.norm()) < 0.02


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}])
def test_keys_and_values_are_of_the_type_that_is_asked_for(directory: Path, options: dict[str, str]) -> None:
    ids, logits, sizes = random_ids(40), {}, {}
    for kind in ("float32", "bfloat16"):
        decoder = load_model(directory, dtype="float32", kv_dtype=kind, **options).decoder
        assert str(decoder.allocate_kv_cache(1)[0][0].dtype) == f"torch.{kind}"
        logits[kind], sizes[kind] = logits_in_chunks(decoder, ids, [30, 1, 9]), decoder.kv_bytes_per_token
    assert sizes["float32"] == 2 * sizes["bfloat16"]
    assert 0 < float((logits["bfloat16"] - logits["float32"]).norm() / logits["float32"].norm()) < 0.02


def test_paths_that_hold_no_model_are_refused_by_name(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere: no such file or directory; check the path"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "model.onnx").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"model\.onnx: not a model; give a model directory or a \*\.gguf file"):
        load_model(tmp_path / "model.onnx")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelLoadError, match=r"empty: no config\.json and no \*\.gguf in it"):
        load_model(empty)
    for name in ("a.gguf", "b.gguf"):
        (empty / name).write_bytes(b"x")
    with pytest.raises(ModelLoadError, match=r"empty: holds 2 GGUF models \(a\.gguf, b\.gguf\); give the path of one"):
        load_model(empty)
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model: no weights"):
        load_model(directory)


def test_broken_or_foreign_configs_are_refused_by_name(directory: Path) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"hidden_act": "relu"}))
    with pytest.raises(ModelLoadError, match=r"config\.json: hidden_act 'relu' is not supported"):
        load_model(directory)
    file.write_text(json.dumps(config | {"num_hidden_layers": "many"}))
    with pytest.raises(ModelLoadError, match=r"config\.json: .*many"):
        load_model(directory)
    file.write_text(json.dumps({"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}))
    with pytest.raises(UnsupportedModel, match=r"MixtralForCausalLM is not supported; supported: LlamaForCausalLM"):
        load_model(directory)
    file.write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read as JSON"):
        load_model(directory)


def test_a_device_without_enough_memory_is_said(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **options: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."
        )

    monkeypatch.setattr(loader, "Decoder", full)
    with pytest.raises(ModelLoadError, match=r"model: its weights do not fit into the memory of cpu; use a larger GPU"):
        load_model(directory)
