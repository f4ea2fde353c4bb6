"""What load_model makes of a path, and what it says when it can make nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as tf
from tests.models.harness import SIZES, logits_in_chunks, random_ids, random_model, save
from tests.models.test_tokenizer import byte_level_backend

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
    loaded = load_model(directory, dtype="bfloat16", max_model_len=100)
    assert (loaded.decoder.dtype, loaded.max_model_len) == (torch.bfloat16, 100)
    assert load_model(directory, dtype=torch.float16).decoder.dtype == torch.float16
    with pytest.raises(ValueError, match=r"int4.*allowed: auto, float32"):
        load_model(directory, dtype="int4")


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
