"""Fields that every protocol shares, through each of them: same meaning, same refusals, the client's own names."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
from protocol_fakes import EOS, VOCAB, ByteTokenizer, context

from carousel.engine.errors import InvalidRequest, QueueFull, RequestTooLong
from carousel.engine.request import SamplingParams
from carousel.protocols import common, generate, openai, v1, v2
from carousel.protocols.common import Call, Context


@dataclass(frozen=True)
class Wire:
    """How a protocol spells a request with parameters, and where it says that they stand."""

    name: str
    parse: Callable[[dict[str, Any], Context], Call]
    prefix: str
    n_allowed: bool = False

    def __str__(self) -> str:
        return self.name


def _v2(parameters: dict[str, Any], ctx: Context) -> Call:
    return v2.parse(v2.V2Request([v2.V2Tensor("text_input", "BYTES", [1], ["hi"])], parameters), ctx)


WIRES = [
    Wire("v1", lambda p, c: v1.parse({"instances": ["hi"], "parameters": p}, c), "parameters."),
    Wire(
        "v1-instance",
        lambda p, c: v1.parse({"instances": [{"prompt": "hi", "parameters": p}]}, c),
        "instances[0].parameters.",
    ),
    Wire("v2", _v2, "parameters."),
    Wire("generate", lambda p, c: generate.parse({"text_input": "hi", "parameters": p}, c), "parameters."),
    Wire(
        "chat",
        lambda p, c: openai.parse_chat({"messages": [{"role": "user", "content": "hi"}], **p}, c),
        "",
        n_allowed=True,
    ),
    Wire("completion", lambda p, c: openai.parse_completion({"prompt": "hi", **p}, c), "", n_allowed=True),
]
each_wire = pytest.mark.parametrize("wire", WIRES, ids=str)


def test_every_sampling_field_of_the_engine_has_a_wire_name():
    assert set(common.SPELLINGS) == {item.name for item in fields(SamplingParams)}


GOOD = {
    "temperature": 0.25,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": -1,
    "frequency_penalty": 0.5,
    "seed": -7,
    "min_tokens": 2,
    "max_tokens": 30,
    "ignore_eos": True,
    "skip_special_tokens": False,
}


@each_wire
def test_good_fields_reach_the_engine(wire):
    lists = {"stop": ["a", "b"], "stop_token_ids": [1, 2], "logit_bias": {"5": -2, "6": 1.5}}
    ctx = context()
    request = wire.parse({**GOOD, **lists, "include_stop_str_in_output": True}, ctx).requests[0]
    sampling = request.sampling
    for name, value in GOOD.items():
        assert getattr(sampling, name) == value
    assert sampling.stop == ("a", "b")
    assert sampling.stop_token_ids == {1, 2}
    assert sampling.logit_bias == {5: -2.0, 6: 1.5}
    assert sampling.include_stop is True
    assert isinstance(sampling.presence_penalty, float)


@each_wire
def test_null_means_absent(wire):
    sampling = wire.parse({**dict.fromkeys(GOOD), "stop": None, "logit_bias": None}, context()).requests[0].sampling
    assert sampling.temperature == 1.0
    assert sampling.stop == ()


@each_wire
def test_top_k_minus_one_means_all(wire):
    assert wire.parse({"top_k": -1}, context()).requests[0].sampling.top_k == 0


NUMBERS = ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
INTEGERS = ["top_k", "seed", "min_tokens", "max_tokens"]
BAD: list[tuple[str, Any, str]] = [
    *(
        (name, value, "number")
        for name in NUMBERS
        for value in (True, "hot", [1], {}, math.nan, math.inf, -1000, 10**400)
    ),
    *((name, value, "integer") for name in INTEGERS for value in (True, "many", 1.5, [1], {}, math.nan)),
    *((name, 10**400, "64") for name in INTEGERS),
    *((name, -2, "integer") for name in ("top_k", "min_tokens", "max_tokens")),
    *((name, v, "true or false") for name in ("ignore_eos", "skip_special_tokens") for v in (1, "yes", [])),
    ("top_p", 0, "a number > 0"),
    ("max_tokens", 0, "an integer >= 1"),
    ("stop", 5, "a string or a list"),
    ("stop", {"a": 1}, "a string or a list"),
    ("stop", "", "non-empty"),
    ("stop", ["x"] * 17, "at most 16"),
    ("stop", "x" * 600, "512 characters"),
    ("stop_token_ids", 5, "a list of token ids"),
    ("logit_bias", [1], "an object"),
    ("logit_bias", 3, "an object"),
    ("priority", "high", "an integer"),
    ("priority", 2**40, "an integer"),
    ("priority", True, "an integer"),
    ("deadline", 0, "seconds > 0"),
    ("deadline", "soon", "seconds > 0"),
    ("cache_salt", 5, "a string"),
    ("cache_salt", "s" * 257, "256"),
    ("cache_salt", "\ud800", "Unicode"),
    ("add_special_tokens", 1, "true or false"),
]


@each_wire
@pytest.mark.parametrize(("name", "value", "allowed"), BAD, ids=lambda item: "" if isinstance(item, int) else None)
def test_bad_fields_are_refused_by_the_clients_name(wire, name, value, allowed):
    with pytest.raises(InvalidRequest) as caught:
        wire.parse({name: value}, context())
    assert caught.value.field == wire.prefix + name
    assert allowed in caught.value.allowed
    assert len(str(caught.value)) < 500


NESTED: list[tuple[str, Any, str, str]] = [
    ("stop", ["ok", 5], "stop[1]", "a string"),
    ("stop", ["ok", "\ud800"], "stop[1]", "Unicode"),
    ("stop_token_ids", [1, VOCAB], "stop_token_ids[1]", "from 0 to 257"),
    ("stop_token_ids", [True], "stop_token_ids[0]", "token ids"),
    ("stop_token_ids", [[1]], "stop_token_ids[0]", "token ids"),
    ("logit_bias", {"x": 1}, "logit_bias", "token ids"),
    ("logit_bias", {str(VOCAB): 1}, "logit_bias", "token ids"),
    ("logit_bias", {"-1": 1}, "logit_bias", "token ids"),
    ("logit_bias", {"²": 1}, "logit_bias", "token ids"),
    ("logit_bias", {"5": "x"}, "logit_bias[5]", "from -100 to 100"),
    ("logit_bias", {"5": 101}, "logit_bias[5]", "from -100 to 100"),
    ("logit_bias", {"5": True}, "logit_bias[5]", "from -100 to 100"),
]


@each_wire
@pytest.mark.parametrize(("name", "value", "field", "allowed"), NESTED)
def test_bad_elements_are_named_with_their_place(wire, name, value, field, allowed):
    with pytest.raises(InvalidRequest) as caught:
        wire.parse({name: value}, context())
    assert caught.value.field == wire.prefix + field
    assert allowed in caught.value.allowed


@each_wire
def test_min_tokens_above_max_tokens(wire):
    with pytest.raises(InvalidRequest, match="max_tokens") as caught:
        wire.parse({"min_tokens": 9, "max_tokens": 8}, context())
    assert caught.value.field == wire.prefix + "min_tokens"


@each_wire
@pytest.mark.parametrize(
    ("typo", "meant"), [("temprature", "temperature"), ("max_token", "max_tokens"), ("stops", "stop")]
)
def test_an_unknown_field_is_refused_with_the_nearest_name(wire, typo, meant):
    with pytest.raises(InvalidRequest, match=f"did you mean '{meant}'") as caught:
        wire.parse({typo: 1}, context())
    assert caught.value.field == wire.prefix + typo


@each_wire
def test_an_unknown_field_like_no_other(wire):
    with pytest.raises(InvalidRequest, match="no field of this name") as caught:
        wire.parse({"q" * 300: 1}, context())
    assert len(caught.value.field) < 130
    assert ("known: " in caught.value.allowed) == bool(wire.prefix), "long lists are left out"


@each_wire
def test_several_choices_only_where_the_answer_has_room(wire):
    if wire.n_allowed:
        assert wire.parse({"n": 3}, context()).requests[0].sampling.n == 3
        with pytest.raises(InvalidRequest, match="1 to 64") as caught:
            wire.parse({"n": 65}, context())
    else:
        with pytest.raises(InvalidRequest, match="OpenAI endpoints") as caught:
            wire.parse({"n": 2}, context())
        with pytest.raises(InvalidRequest, match="OpenAI endpoints"):
            wire.parse({"prompt_logprobs": 2}, context())
    assert caught.value.field == wire.prefix + "n"


def test_two_spellings_of_one_field_must_agree():
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "max_completion_tokens": 5}
    assert openai.parse_chat(body, context()).requests[0].sampling.max_tokens == 5
    with pytest.raises(InvalidRequest, match="the same value as max_completion_tokens"):
        openai.parse_chat({**body, "max_tokens": 6}, context())
    with pytest.raises(InvalidRequest) as caught:
        openai.parse_chat({**body, "max_tokens": -1, "max_completion_tokens": -1}, context())
    assert caught.value.field == "max_completion_tokens"


@each_wire
def test_generation_config_fills_what_the_client_leaves_out(wire):
    defaults = {"temperature": 0.3, "top_k": 7, "top_p": 0.8, "max_new_tokens": 11, "do_sample": True, "min_p": None}
    sampling = wire.parse({"top_p": 0.5}, context(defaults=defaults)).requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens) == (0.3, 7, 0.5, 11)
    assert wire.parse({"max_tokens": 4}, context(defaults=defaults)).requests[0].sampling.max_tokens == 4


@each_wire
def test_a_broken_generation_config_is_named_as_such(wire):
    with pytest.raises(InvalidRequest) as caught:
        wire.parse({}, context(defaults={"temperature": -3}))
    assert caught.value.field == "generation_config.temperature"


def test_protocol_defaults_of_max_tokens():
    lengths = {wire.name: wire.parse({}, context()).requests[0].sampling.max_tokens for wire in WIRES}
    assert lengths == {"v1": None, "v1-instance": None, "v2": None, "generate": 20, "chat": None, "completion": 16}


@pytest.mark.parametrize(("length", "left"), [(10, 16), (83, 16), (90, 9), (99, 1), (120, 1)])
def test_a_default_length_gives_way_to_a_long_prompt(length, left):
    """max_model_len is 100, and the tokenizer adds one token."""
    request = openai.parse_completion({"prompt": "x" * length}, context()).requests[0]
    assert request.sampling.max_tokens == left
    tokens = request.prompt if isinstance(request.prompt, list) else ByteTokenizer().encode(request.prompt)
    assert tokens == [256, *(b"x" * length)]
    ids = openai.parse_completion({"prompt": [1] * min(length, 100)}, context()).requests[0]
    assert ids.sampling.max_tokens == max(1, min(16, 100 - min(length, 100)))


def test_a_length_that_the_client_asked_for_is_left_to_the_engine():
    request = openai.parse_completion({"prompt": "x" * 95, "max_tokens": 50}, context()).requests[0]
    assert request.sampling.max_tokens == 50
    assert request.prompt == "x" * 95


HEADERS = {
    "x-request-id": "abc/1",
    "x-carousel-tenant": "équipe",
    "x-carousel-priority": "-3",
    "x-carousel-deadline": "0.5",
    "x-request-timeout": "30",
}


@each_wire
def test_headers_are_honoured(wire):
    call = wire.parse({}, context(HEADERS))
    request = call.requests[0]
    assert call.id.endswith("abc/1")
    assert request.request_id.startswith(call.id + "-0-")
    assert (request.tenant, request.priority, request.deadline_s, request.timeout_s) == ("équipe", -3, 0.5, 30.0)
    assert wire.parse({}, context(HEADERS)).requests[0].request_id != request.request_id


@each_wire
def test_headers_against_the_body(wire):
    timeout = {"timeout_seconds": 12.5} if wire.name == "v2" else {"timeout": 12.5}
    request = wire.parse({"priority": 9, "deadline": 4, **timeout}, context(HEADERS)).requests[0]
    assert (request.priority, request.deadline_s, request.timeout_s) == (-3, 0.5, 12.5)
    alone = wire.parse({"priority": 9, "deadline": 4, "cache_salt": "s", **timeout}, context()).requests[0]
    assert (alone.priority, alone.deadline_s, alone.timeout_s, alone.cache_salt) == (9, 4.0, 12.5, "s")
    shorter = wire.parse(timeout, context({"x-request-timeout": "1.5"})).requests[0]
    assert shorter.timeout_s == 1.5


BAD_HEADERS = [
    ("x-request-id", ""),
    ("x-request-id", "a b"),
    ("x-request-id", "é"),
    ("x-request-id", "x" * 129),
    ("x-carousel-tenant", "x" * 129),
    ("x-carousel-tenant", "a\tb"),
    ("x-carousel-priority", "high"),
    ("x-carousel-priority", "9999999999"),
    ("x-carousel-priority", "1e3"),
    ("x-request-timeout", "0"),
    ("x-request-timeout", "-1"),
    ("x-request-timeout", "nan"),
    ("x-request-timeout", "9999999"),
    ("x-carousel-deadline", "inf"),
    ("x-carousel-deadline", "0.0"),
]


@each_wire
@pytest.mark.parametrize(("name", "value"), BAD_HEADERS)
def test_bad_headers_are_refused_by_name(wire, name, value):
    with pytest.raises(InvalidRequest) as caught:
        wire.parse({}, context({name: value}))
    assert caught.value.field == name


@each_wire
def test_what_the_engine_refuses_gets_the_clients_name(wire):
    call = wire.parse({"max_tokens": 5, "logit_bias": {"1": 1}}, context())
    too_long = call.restate(RequestTooLong("max_tokens", 5, "at most 3"))
    assert isinstance(too_long, RequestTooLong)
    assert too_long.field == wire.prefix + "max_tokens"
    bias = call.restate(InvalidRequest("logit_bias[1]", 1, "x"))
    assert isinstance(bias, InvalidRequest)
    assert bias.field == wire.prefix + "logit_bias[1]"
    prompt = call.restate(InvalidRequest("prompt[7]", 1, "x"))
    assert isinstance(prompt, InvalidRequest)
    assert prompt.field.split(".")[-1].startswith(("prompt", "instances[0]", "data[0]", "text_input", "messages"))
    full = QueueFull("full", 1.0)
    assert call.restate(full) is full


@each_wire
def test_the_stop_token_may_be_the_last_of_the_vocabulary(wire):
    assert wire.parse({"stop_token_ids": [EOS]}, context()).requests[0].sampling.stop_token_ids == {EOS}
