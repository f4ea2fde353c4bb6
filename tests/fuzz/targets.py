"""What is fuzzed: a target takes bytes and may raise nothing. For the atheris harnesses and for the replay test."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.engine.tiny import byte_tokenizer

from carousel import tensors
from carousel.engine.detokenizer import Detokenizer
from carousel.engine.errors import CarouselError
from carousel.models.errors import ModelLoadError
from carousel.models.gguf import GGUFSource, hf_config
from carousel.models.tokenizer import Tokenizer, load_gguf_tokenizer
from carousel.models.weights import open_safetensors
from carousel.protocols import errors, generate, openai, tokenize, v1, v2
from carousel.protocols.common import Context, decode_body, json_bytes

MODEL = "tiny"


@functools.cache
def tokenizer() -> Tokenizer:
    return byte_tokenizer()


@functools.cache
def context() -> Context:
    return Context(tokenizer(), MODEL, vocab_size=320, max_model_len=512)


def _answer(error: CarouselError) -> None:
    """The error can be sent, is the client's, and is short."""
    info = errors.describe(error)
    assert 400 <= info.status < 500, (info.status, error)
    assert len(info.message) < 2000
    json.loads(json_bytes(errors.openai_error_body(info)))


_PARSERS: list[Callable[[object], object]] = [
    lambda body: openai.parse_chat(body, context()),
    lambda body: openai.parse_completion(body, context()),
    lambda body: v1.parse(body, context()),
    lambda body: generate.parse(body, context()),
    lambda body: generate.parse(body, context(), stream=True),
    lambda body: tokenize.parse_tokenize(body, context()).run(),
    lambda body: tokenize.parse_detokenize(body, context()).run(),
]


def protocol_json(data: bytes) -> None:
    """The first byte chooses the protocol, the others are the body."""
    if not data:
        return
    try:
        _PARSERS[data[0] % len(_PARSERS)](decode_body(data[1:]))
    except CarouselError as error:
        _answer(error)


def binary_tensors(data: bytes) -> None:
    """Two bytes of the JSON's length (0xffff: no such header), then the body of ``infer``."""
    if len(data) < 2:
        return
    length, body = int.from_bytes(data[:2], "little"), data[2:]
    headers = {} if length == 0xFFFF else {tensors.BINARY_HEADER: str(length)}
    try:
        request = tensors.request_from_rest(body, headers, MODEL, "")
        v2.parse(tensors.neutral_request(request), context())
    except CarouselError as error:
        _answer(error)


def detokenizer(data: bytes) -> None:
    """A byte of flags, stop strings up to a byte 0, then the tokens. What is taken joins to the whole text, cut at the
    first stop string, whichever way it is taken."""
    if not data:
        return
    flags = data[0]
    raw_stops, _, raw = data[1:].partition(b"\x00")
    stops = tuple(stop for stop in raw_stops.decode("utf-8", "replace").split("\n") if stop)[:4]
    include, least = bool(flags & 1), flags >> 5
    ids = [byte + 256 if flags & 2 and byte % 7 == 0 and byte < 64 else byte for byte in raw[:200]]
    subject = Detokenizer(tokenizer(), stop=stops, include_stop=include, min_tokens=least)
    text, stopped = "", None
    for token in ids:
        stopped = subject.append(token)
        if flags & 4 or stopped is not None:
            text += subject.take()
        if stopped is not None:
            break
    if stopped is None:
        text += subject.flush()
        assert text == tokenizer().decode(ids), (text, ids)
    else:
        assert stopped in stops
        assert text.endswith(stopped) if include else tokenizer().decode(ids).startswith(text)
    assert text == subject.text
    text.encode("utf-8")


@functools.cache
def _directory() -> Path:
    memory = Path("/dev/shm")  # a disk would be the slowest part
    return Path(tempfile.mkdtemp(prefix="carousel-fuzz-", dir=memory if memory.is_dir() else None))


def gguf_header(data: bytes) -> None:
    """A whole file: header, config and tokenizer of it."""
    path = _directory() / "fuzz.gguf"
    path.write_bytes(data)
    try:
        source = GGUFSource(path)
    except ModelLoadError:
        return
    try:
        hf_config(source)
        load_gguf_tokenizer(source.metadata, str(path))
    except (ModelLoadError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        pass  # the loader says these of the file


def safetensors_header(data: bytes) -> None:
    """A whole file: its header, and every tensor that it describes is read."""
    import torch

    path = _directory() / "model.safetensors"
    path.write_bytes(data)
    try:
        source = open_safetensors(path.parent)
        for name, shape in source.shapes().items():
            source.read(name, torch.empty(shape))
    except ModelLoadError:
        pass


TARGETS: dict[str, Callable[[bytes], None]] = {
    "protocol_json": protocol_json,
    "binary_tensors": binary_tensors,
    "detokenizer": detokenizer,
    "gguf_header": gguf_header,
    "safetensors_header": safetensors_header,
}
