"""Model files may come from anybody: whatever they hold, loading ends soon, in little memory, with a reason."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.models import hostile_files
from tests.models.hostile_files import CONFIGS, GGUF, SAFETENSORS, write_directory, write_gguf

from carousel.models.errors import ModelLoadError
from carousel.models.loader import load_model

HEADROOM = 512 * 2**20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "model")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with ``model`` (a whole one) and ``good.gguf``; tests put back what they change."""
    directory = tmp_path_factory.mktemp("good")
    write_directory(directory / "model")
    write_gguf(directory / "good.gguf")
    load_model(directory / "model")
    load_model(directory / "good.gguf")
    return directory


def test_every_hostile_file_is_refused_within_hard_limits(good: Path) -> None:
    """In a process that may take 512 MiB of address space beyond its imports, and 120 s of CPU for all of them."""
    command = [sys.executable, hostile_files.__file__, str(good / "model"), str(good), str(HEADROOM)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    said = dict(json.loads(line) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(said) == len(GGUF) + len(SAFETENSORS) + len(CONFIGS)
    wrong = {name: text for name, text in said.items() if text.startswith(("LOADED", "RAISED"))}
    assert not wrong
    unnamed = {name: text for name, text in said.items() if str(good) not in text and "is not supported" not in text}
    assert not unnamed


def attempt(path: Path) -> None:
    """Loads, or is refused in words."""
    refused = ""
    try:
        load_model(path)
    except ModelLoadError as error:
        refused = str(error)
    assert len(refused) < 2000


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 6), cut=st.booleans())
def test_a_mutated_gguf_file_loads_or_is_refused(good: Path, seed: int, count: int, cut: bool) -> None:
    raw = bytearray((good / "good.gguf").read_bytes())
    header = len(raw) - 200_000 if len(raw) > 300_000 else len(raw) // 4
    mutate(raw, seed, count, min(header, 12_000))
    path = good / "mutated.gguf"
    path.write_bytes(raw[: len(raw) // 2] if cut else raw)
    attempt(path)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    count=st.integers(1, 6),
    name=st.sampled_from(["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"]),
)
def test_a_mutated_directory_loads_or_is_refused(good: Path, seed: int, count: int, name: str) -> None:
    path = good / "model" / name
    whole = path.read_bytes()
    raw = bytearray(whole)
    mutate(raw, seed, count, min(len(raw), 3000))
    try:
        path.write_bytes(raw)
        attempt(good / "model")
    finally:
        path.write_bytes(whole)


def mutate(raw: bytearray, seed: int, count: int, within: int) -> None:
    """Change ``count`` places: single bytes, whole numbers, pieces copied or taken away."""
    chance = random.Random(seed)
    for _ in range(count):
        at = chance.randrange(max(1, min(within, len(raw) - 16)))
        kind = chance.randrange(5)
        if kind == 0:
            raw[at] = chance.randrange(256)
        elif kind == 1:
            raw[at : at + 8] = chance.choice((0, 1, 2**31, 2**32 - 1, 2**60, 2**63, 2**64 - 1)).to_bytes(8, "little")
        elif kind == 2:
            raw[at : at + 4] = chance.randbytes(4)
        elif kind == 3:
            raw[at:at] = raw[max(0, at - chance.randrange(64)) : at]
        else:
            del raw[at : at + chance.randrange(16)]


# ---- files that are no files, and links


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "loop", "dangling"])
def test_what_is_no_regular_file_is_refused_at_once(model: Path, name: str, kind: str) -> None:
    path = model / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": name, "dangling": "/nowhere/at/all"}[kind])
    if name == "chat_template.jinja":
        attempt(model)  # a template that is not there is no error
        return
    with pytest.raises(ModelLoadError, match=r"model"):
        load_model(model)


def test_a_pipe_beside_its_directory_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.gguf")
    for path in (tmp_path, tmp_path / "x.gguf"):
        with pytest.raises(ModelLoadError):
            load_model(path)


def test_links_to_files_are_followed(model: Path, tmp_path: Path) -> None:
    """The Hub's cache is made of links, and so are mounted volumes."""
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in model.iterdir():
        (linked / file.name).symlink_to(os.path.relpath(file, linked))
    load_model(linked)


@pytest.mark.parametrize(
    "shard", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", ".safetensors", "x" * 300, 3, None, []]
)
def test_an_index_names_only_files_beside_it(model: Path, shard: object) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(ModelLoadError, match=r"index\.json.*(no plain file name|not a valid weight index)"):
        load_model(model)


def test_a_file_larger_than_it_can_mean_is_not_read(model: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        path = model / name
        whole = path.read_bytes()
        with path.open("ab") as file:
            file.truncate(600 * 2**20)  # a hole, which takes no room on the disk
        with pytest.raises(ModelLoadError, match=rf"{name}"):
            load_model(model)
        path.write_bytes(whole)


# ---- tokenizers


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "zz"]]}},
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": ["x"]}},
        {"model": {"type": "Nothing"}},
        {"model": None},
        {"added_tokens": [{"id": 2**40, "content": "x"}]},
        {"added_tokens": "x"},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}},
        {"post_processor": {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {"x": 1}}},
        {"decoder": {"type": "Sequence", "decoders": [{"type": "Nothing"}]}},
        {"truncation": {"max_length": -1}},
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "!!!"}},
    ],
    ids=lambda change: str(change)[:60],
)  # fmt: skip
def test_a_broken_tokenizer_is_refused(model: Path, change: dict[str, object]) -> None:
    path = model / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    refused = "tokenizer.json"
    try:
        load_model(model).tokenizer.encode("abc")  # what is taken works
    except ModelLoadError as error:
        refused = str(error)
    assert "tokenizer.json" in refused


async def test_a_token_that_the_model_does_not_know_harms_nobody() -> None:
    """A vocabulary larger than the embedding: asked for such a token, the engine would read past its table."""
    from tests.engine.tiny import started_engine

    from carousel.engine.errors import InvalidRequest
    from carousel.engine.request import GenerationRequest, SamplingParams

    engine = started_engine()
    try:
        engine.tokenizer.backend.add_tokens(["<beyond>"])
        with pytest.raises(InvalidRequest, match="does not know"):
            engine.submit(GenerationRequest(prompt="a<beyond>b"))
        params = SamplingParams(max_tokens=2)
        assert (await engine.generate(GenerationRequest(prompt="ab", sampling=params)))[0].completion_tokens == 2
        assert engine.alive
    finally:
        engine.stop()
        # the tokenizer is shared by all tests of the process
        from tests.engine import tiny

        tiny.tiny_model.cache_clear()


def test_a_vocabulary_of_absurd_tokens_is_refused(good: Path) -> None:
    """Finding the merges of a SentencePiece vocabulary looks at every cut of every token."""
    from tests.models.gguf_files import letters, write

    metadata = letters(320)
    metadata["tokenizer.ggml.tokens"][5] = "x" * 1_000_000
    weights = {"token_embd.weight": torch.zeros(320, 32).numpy()}
    config = {"llama.embedding_length": 32, "llama.attention.head_count": 4, "llama.block_count": 1}
    path = write(
        good / "absurd.gguf",
        "llama",
        metadata | config | {"llama.context_length": 8, "llama.feed_forward_length": 8},
        weights,
    )
    with pytest.raises(ModelLoadError, match="thousands of characters"):
        load_model(path)


def test_a_config_cannot_make_the_loader_allocate(model: Path) -> None:
    """The weights are looked at before anything of their size is made: a config may say any number."""
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": 2**24, "hidden_size": 2**18}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="has shape"):
        load_model(model)
    save_file({"model.embed_tokens.weight": torch.zeros(1, 1)}, model / "model.safetensors")
    with pytest.raises(ModelLoadError, match="has shape"):
        load_model(model)
