"""Weights in 8 bits: close to the originals, kept in the cache, and never trusted there without a look."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

import pytest
import torch
import transformers as tf
from tests.engine.tiny import MAX_LEN, _config, _weights, byte_tokenizer, tiny_settings
from tests.models.harness import SIZES, PagedRun, logits_in_chunks, random_ids, random_model, save
from tests.models.test_tokenizer import byte_level_backend

import carousel_kernels as ck
from carousel.engine.engine import Engine
from carousel.engine.request import GenerationRequest, SamplingParams
from carousel.models import prepared, quantization
from carousel.models.decoder import Decoder
from carousel.models.families import decoder_config
from carousel.models.loader import LoadedModel, load_model
from carousel.models.prepared import PreparedStore, weights_key
from carousel.models.quantization import QuantizingWeights, scheme_of
from carousel.models.weights import DictSource, open_safetensors
from carousel_kernels.cpu import linear, quant

CPU = torch.device("cpu")
IDS = random_ids(24)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    config = tf.Qwen2Config(**SIZES, tie_word_embeddings=request.param)  # qkv with biases
    save(random_model(config), tmp_path / "model")
    tf.PreTrainedTokenizerFast(tokenizer_object=byte_level_backend()).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(directory: Path, cache: Path | None) -> tuple[torch.Tensor, str]:
    """Logits of IDS, and what the log said."""
    lines: list[str] = []
    loaded = load_model(directory, quantization="int8", cache_dir=cache, log=lines.append)
    return logits_in_chunks(loaded.decoder, IDS, [7]), lines[0]


def test_logits_stay_close_and_the_cache_gives_the_same(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = logits_in_chunks(load_model(directory).decoder, IDS, [7])
    first, said = load(directory, tmp_path / "cache")
    assert said.endswith("quantised now and kept")
    assert 0 < float((first - plain).norm() / plain.norm()) < 0.08  # a tiny model, whose errors little averages out
    without, said = load(directory, None)
    assert said.endswith("quantised now")
    assert torch.equal(first, without)

    def never(*_: object) -> object:
        raise AssertionError("quantised or measured again")

    monkeypatch.setattr(ck, "quantize_weight", never)
    monkeypatch.setattr(quant, "_choices", {})
    monkeypatch.setattr(linear, "_choices", {})
    monkeypatch.setattr(quant, "_measure", never)
    second, said = load(directory, tmp_path / "cache")
    assert said.endswith("quantised before")
    assert torch.equal(first, second)


@pytest.mark.parametrize("directory", [True], indirect=True)
def test_damage_is_seen_and_mended(directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, _ = load(directory, tmp_path)
    (file,) = (tmp_path / "prepared").glob("*.weights")
    whole = file.read_bytes()
    manifest = file.with_suffix(".json").read_bytes()
    flipped = bytearray(whole)
    flipped[-100] ^= 1
    for content, words in ((bytes(flipped), "checksum"), (whole[:-64], "bytes instead of"), (b"", "bytes instead of")):
        caplog.clear()
        file.write_bytes(content)
        again, said = load(directory, tmp_path)
        assert said.endswith("quantised now and kept")
        assert words in caplog.text
        assert torch.equal(first, again)
        assert file.read_bytes() == whole
    for other in (b"{", b"[]", b"{}", json.dumps(json.loads(manifest) | {"format": 0}).encode()):
        file.with_suffix(".json").write_bytes(other)
        again, said = load(directory, tmp_path)
        assert said.endswith("quantised now and kept")
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))  # copied: another time, the same content
    assert load(directory, tmp_path)[1].endswith("quantised before")
    assert not list((tmp_path / "prepared").glob(".*"))


@pytest.mark.parametrize("directory", [False], indirect=True)
def test_tensors_of_another_model_are_not_taken(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantization, "weights_key", lambda *_, **__: "key")
    PreparedStore(tmp_path).save("key", {"embed_tokens.weight": torch.zeros(3, 3)})
    _, said = load(directory, tmp_path)
    assert "not this model's (embed_tokens.weight" in caplog.text
    assert said.endswith("quantised now and kept")
    assert load(directory, tmp_path)[1].endswith("quantised before")


@pytest.mark.parametrize("directory", [False], indirect=True)
def test_a_cache_that_cannot_be_written(
    directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").write_text("no folder")
    first, said = load(directory, tmp_path / "file" / "cache")
    assert said.endswith("quantised now")
    assert "cannot be written" in caplog.text
    load(directory, tmp_path)

    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(prepared.tempfile, "mkstemp", read_only)
    monkeypatch.setattr(quant, "_choices", {})
    again, said = load(directory, tmp_path)
    assert said.endswith("quantised before")
    assert torch.equal(first, again)


def test_the_key_follows_weights_and_conditions(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"one")
    key = weights_key([file], "int8", root=tmp_path)
    assert key == weights_key([file], "int8", root=tmp_path) == weights_key([file], "int8")
    assert key != weights_key([file], "int4", root=tmp_path)
    status = file.stat()
    file.write_bytes(b"two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert key != weights_key([file], "int8", root=tmp_path)
    (tmp_path / "prepared" / "checksums.json").write_text("damaged")
    file.write_bytes(b"one")
    assert key == weights_key([file], "int8", root=tmp_path)


def test_damaged_measurements_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = PreparedStore(tmp_path)
    assert store.restore_choices() == {}
    ck.prepare_quantized_linear(ck.quantize_weight(torch.rand(40, 24)))
    store.save_choices({})
    (file,) = (tmp_path / "prepared").glob("linear-*.json")
    written = file.read_text()
    store.save_choices(store.restore_choices())  # nothing new
    assert file.read_text() == written
    file.write_text('{"linear": 5}')
    assert store.restore_choices() == {}
    assert "measuring again" in caplog.text


def test_schemes_that_do_not_run_are_refused() -> None:
    assert (scheme_of("auto", CPU), scheme_of("none", CPU), scheme_of("int8", CPU)) == ("none", "none", "int8")
    assert scheme_of("auto", torch.device("cuda")) == "none"
    with pytest.raises(ValueError, match=r"'int3' is not known; allowed: auto, none, int8"):
        scheme_of("int3", CPU)
    with pytest.raises(ValueError, match=r"int8 does not run on cuda; choose none, or auto"):
        scheme_of("int8", torch.device("cuda"))


def int8_decoder() -> Decoder:
    config = _config()
    return Decoder(config, QuantizingWeights(DictSource(_weights(config)), config, torch.float32, "int8"))


@pytest.mark.parametrize("inner", [48, 256])
def test_activations_take_16_bits_where_nothing_else_helps(
    inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length that a turn mixes well is turned; where the residual stream is rotated, its readers take 8 bits."""
    asked: dict[tuple[int, int], tuple[bool, bool]] = {}

    def prepare(weight: ck.QuantizedWeight, *, wide: bool, turned: bool) -> object:
        asked[weight.columns, weight.inputs] = (wide, turned)
        return quant.prepare_quantized_linear(weight, wide=wide, turned=turned)

    monkeypatch.setattr(ck, "prepare_quantized_linear", prepare)
    for model in (tf.LlamaConfig, tf.Gemma2Config):
        asked.clear()
        save(random_model(model(**SIZES | {"intermediate_size": inner})), tmp_path)
        config = decoder_config(json.loads((tmp_path / "config.json").read_text()))
        Decoder(config, QuantizingWeights(open_safetensors(tmp_path), config, torch.float32, "int8"))
        assert asked[config.hidden_size, inner] == (inner == 48, inner == 256)
        stream = (config.post_norms, False)
        assert asked[2 * inner, config.hidden_size] == asked[config.vocab_size, config.hidden_size] == stream


def test_only_one_layer_is_held_in_full() -> None:
    """What stays is the table, the norms and a quarter of the rest; ``weight_bytes`` says so."""
    config, source = _config(), DictSource(_weights(_config()))
    weights = QuantizingWeights(source, config, torch.float32, "int8")
    decoder = Decoder(config, weights)
    assert decoder.weight_bytes == sum(tensor.nbytes for tensor in weights.made.values())
    kept = [name for name, tensor in weights.made.items() if tensor.dtype == torch.float32 and tensor.dim() > 1]
    assert kept == ["embed_tokens.weight"]


async def test_greedy_text_is_the_same_alone_and_in_a_batch() -> None:
    model = LoadedModel(int8_decoder(), byte_tokenizer(), {}, "LlamaForCausalLM", Path("tiny"), MAX_LEN)
    engine = Engine(model, tiny_settings(prefix_caching=False, kv_cache_memory="8MiB"))
    engine.start()
    prompts = [[(7 * i + j * j) % 250 for j in range(3 + 11 * i)] for i in range(6)]

    async def answer(ids: list[int]) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        return list((await engine.generate(GenerationRequest(prompt=ids, sampling=sampling)))[0].token_ids)

    try:
        alone = [await answer(ids) for ids in prompts]
        assert list(await asyncio.gather(*map(answer, prompts))) == alone
    finally:
        engine.stop()
    run = PagedRun(model.decoder)
    logits = run.step({0: prompts[0]})
    assert int(logits[-1].argmax()) == alone[0][0]
