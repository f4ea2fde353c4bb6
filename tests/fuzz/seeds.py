"""Inputs to begin from, made of the tables of good and bad values; what the fuzzers found lies in ``corpus``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.models.hostile_files import GGUF, SAFETENSORS, array, entry, head, pair, tensor, tensors_file, text

CORPUS = Path(__file__).parent / "corpus"
_CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stop": ["x"]}
_BODIES = [
    _CHAT,
    {"prompt": ["a", "b"], "logit_bias": {"1": 2}, "n": 2, "stream": True, "stream_options": {"include_usage": True}},
    {"instances": ["a", {"prompt": [1, 2], "parameters": {"top_k": 3}}], "parameters": {"seed": 1}},
    {"text_input": "hi", "parameters": {"temperature": 0.5, "details": True}},
    {"text_input": "hi", "parameters": {"stop": ["x"], "stop_token_ids": [1]}},
    {"prompt": "hi", "return_token_strs": True},
    {"tokens": [1, 2]},
]
_TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1]}


def _binary(raw: bytes, **more: object) -> bytes:
    tensor = {**_TENSOR, "parameters": {"binary_data_size": len(raw)}}
    body = json.dumps({"inputs": [tensor], **more}).encode()
    return len(body).to_bytes(2, "little") + body + raw


def _gguf() -> bytes:
    words = b"".join(text(word) for word in ("<unk>", "<s>", "</s>", "a", "b", "ab"))
    pairs = [
        pair("general.architecture", 8, text("llama")),
        pair("llama.attention.head_count", 4, (2).to_bytes(4, "little")),
        pair("llama.embedding_length", 4, (8).to_bytes(4, "little")),
        pair("tokenizer.ggml.model", 8, text("llama")),
        pair("tokenizer.ggml.tokens", 9, array(8, 6, words)),
        pair("tokenizer.ggml.scores", 9, array(6, 6, b"\0" * 24)),
        pair("tokenizer.ggml.bos_token_id", 4, (1).to_bytes(4, "little")),
        pair("tokenizer.chat_template", 8, text("{{ messages }}")),
    ]
    return head(*pairs, tensor("token_embd.weight", [8, 6], 0, 0), b"\0" * 400, pairs=len(pairs), tensors=1)


def seeds(name: str) -> list[bytes]:
    """The inputs of a target, those that were found and kept included."""
    made = {
        "protocol_json": [bytes([i]) + json.dumps(body).encode() for i, body in enumerate(_BODIES)],
        "binary_tensors": [
            _binary(b"\x02\0\0\0hi"),
            _binary(b"\x02\0\0\0hi", parameters={"max_tokens": 2, "binary_data_output": True}),
            _binary(b"\x09\0\0\0hi"),
            b"\xff\xff" + json.dumps({"inputs": [{**_TENSOR, "data": ["hi"]}], "id": "x"}).encode(),
        ],
        "detokenizer": [
            b"\x04ab\ncd\0xxabxx",
            b"\x05\xe2\x82\xac\0\xe2\x82\xac\xe2",
            b"\x06\0\xf0\x9f\x98\x80abc",
            b"\x00abc\0ababc",
        ],
        "gguf_header": [_gguf(), *GGUF.values()],
        "safetensors_header": [tensors_file({"a": entry(), "b": entry(4, 8)}, b"\0" * 8), *SAFETENSORS.values()],
    }[name]
    return [*made, *(path.read_bytes() for path in sorted((CORPUS / name).glob("*")))]
