"""Whatever a client sends, a parser answers with requests or with an error that can be sent back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol_fakes import context

from carousel.engine.errors import CarouselError
from carousel.protocols import common, errors, generate, jsonio, openai, openai_common, v1, v2
from carousel.protocols.v2 import V2Request, V2Tensor

TEXT = st.text(max_size=6) | st.sampled_from(["\ud800", "é", "user", "demo", "text", "[1]", '{"1": 2}'])
SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.just(10**400)
ANY = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
NAMES = sorted(
    common.SAMPLING_NAMES
    | common.OPTION_NAMES
    | openai_common.BODY
    | openai_common.UNSUPPORTED_CHAT.keys()
    | openai_common.IGNORED.keys()
    | {"top_logprobs", "details", "timeout_seconds", "sequence_id", "chat_template_kwargs", "echo"}
)
FIELDS = st.dictionaries(st.sampled_from(NAMES) | TEXT, ANY, max_size=4)
MESSAGE = st.fixed_dictionaries({"role": TEXT, "content": ANY}) | ANY
PARSERS = {
    "chat": lambda a, b: openai.parse_chat({"messages": a, **b}, context()),
    "completion": lambda a, b: openai.parse_completion({"prompt": a, **b}, context()),
    "generate": lambda a, b: generate.parse({"text_input": "x", "parameters": b}, context()),
    "v1": lambda a, b: v1.parse({"instances": a, "parameters": b}, context()),
    "whole body": lambda a, b: v1.parse(a, context()),
    "v2 parameters": lambda a, b: v2.parse(V2Request([V2Tensor("text_input", "BYTES", [1], ["x"])], b), context()),
}


def attempt(parse):
    """(call, None), or (None, what the client is told)."""
    try:
        return parse(), None
    except CarouselError as error:
        return None, errors.describe(error)


@pytest.mark.parametrize("parser", PARSERS)
@settings(max_examples=60, deadline=None)
@given(first=st.lists(MESSAGE, max_size=3) | ANY, fields=FIELDS)
def test_any_body_is_a_call_or_a_clients_error(parser, first, fields):
    call, info = attempt(lambda: PARSERS[parser](first, fields))
    if info is not None:
        assert 400 <= info.status < 500
        assert len(info.message) < 2000
        assert info.message in json.loads(jsonio.json_bytes(errors.openai_error_body(info)))["error"]["message"]
    for request in call.requests if call else []:
        request.sampling.validate(258)


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["text_input", "stop", "temperature", "max_tokens", "stop_token_ids", "ignore_eos", "x"]),
    datatype=st.sampled_from(["BYTES", "INT32", "FP32", "BOOL", "x"]),
    shape=st.lists(st.integers(-1, 3), max_size=3),
    data=st.lists(ANY, max_size=4) | ANY,
)
def test_any_tensor_is_a_row_or_a_clients_error(name, datatype, shape, data):
    tensors = [V2Tensor("text_input", "BYTES", [2], ["a", "b"]), V2Tensor(name, datatype, shape, data)]
    call, info = attempt(lambda: v2.parse(V2Request(tensors), context()))
    assert info.status == 400 if call is None else len(call.requests) == 2
