"""Open Inference Protocol generate and generate_stream."""

from __future__ import annotations

import asyncio

import pytest
from protocol_fakes import context, logprob, output, read_events, script

from carousel.engine.errors import GenerationFailed, InvalidRequest
from carousel.engine.request import FinishReason
from carousel.protocols import generate

BASE = {"model_name": "demo", "model_version": "1"}


def parse(parameters=None, *, stream=False):
    return generate.parse({"text_input": "hi", "parameters": parameters or {}}, context(), stream=stream)


def test_a_plain_request():
    call = generate.parse({"text_input": "hi"}, context())
    assert call.requests[0].prompt == "hi"
    assert call.requests[0].sampling.max_tokens == 20
    assert call.requests[0].sampling.logprobs is None
    assert call.names[0]["prompt"] == "text_input"
    assert not call.stream


BAD = [
    ([], "body", "a JSON object"),
    ({}, "text_input", "a string"),
    ({"text_input": None}, "text_input", "a string"),
    ({"text_input": 5}, "text_input", "a string"),
    ({"text_input": ["a"]}, "text_input", "a string"),
    ({"text_input": "\ud800"}, "text_input", "surrogates"),
    ({"text_input": "x", "parameters": "y"}, "parameters", "a JSON object"),
    ({"text_input": "x", "max_tokens": 5}, "max_tokens", "sampling fields go into parameters"),
    ({"text_input": "x", "parameters": {"details": 1}}, "parameters.details", "true or false"),
    ({"text_input": "x", "parameters": {"stream": "no"}}, "parameters.stream", "true or false"),
    ({"text_input": "x", "parameters": {"stream": True}}, "parameters.stream", "generate_stream does"),
    ({"text_input": "x", "parameters": {"detials": True}}, "parameters.detials", "did you mean 'details'"),
]


@pytest.mark.parametrize(("body", "field", "allowed"), BAD)
def test_bad_bodies(body, field, allowed):
    with pytest.raises(InvalidRequest) as caught:
        generate.parse(body, context())
    assert caught.value.field == field
    assert allowed in caught.value.allowed


def test_stream_in_the_parameters_must_fit_the_endpoint():
    assert parse({"stream": True}, stream=True).stream
    assert not parse({"stream": False}).stream
    with pytest.raises(InvalidRequest):
        parse({"stream": False}, stream=True)


def test_details_ask_for_log_probabilities():
    assert parse({"details": True}).requests[0].sampling.logprobs == 0
    call = parse({"logprobs": 2})
    assert (call.details, call.requests[0].sampling.logprobs) == (True, 2)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (FinishReason.EOS, "eos_token"),
        (FinishReason.STOP, "stop_sequence"),
        (FinishReason.LENGTH, "length"),
        (FinishReason.TIMEOUT, "timeout"),
        (FinishReason.CANCELLED, "cancelled"),
    ],
)
def test_the_answer_with_details(reason, said):
    call = parse({"details": True})
    body = generate.render(call, [[output("h", finish=reason, logprobs=[logprob(104)])]])
    records = [{"id": 104, "text": "h", "logprob": -0.5, "special": False}]
    assert body == {"text_output": "h", **BASE, "details": {"finish_reason": said, "logprobs": records}}


def test_the_answer_without_details_is_plain_unless_it_is_cut_short():
    assert generate.render(parse(), [[output("h", finish=FinishReason.EOS)]]) == {"text_output": "h", **BASE}
    late = generate.render(parse(), [[output("h", finish=FinishReason.TIMEOUT)]])
    assert late["details"] == {"finish_reason": "timeout", "logprobs": []}
    with pytest.raises(GenerationFailed):
        generate.render(parse(), [[output("h", finish=FinishReason.ERROR)]])


async def events(call, *items):
    return await read_events(generate.stream_events(call, [script(*items)]))


async def test_a_plain_stream():
    call = parse(stream=True)
    got = await events(call, output("He"), output(""), output("y😀"), output("!", finish=FinishReason.LENGTH))
    assert got == [
        {"text_output": "He", **BASE},
        {"text_output": "y😀", **BASE},
        {"text_output": "!", **BASE, "details": {"finish_reason": "length"}},
    ]


async def test_a_stream_with_details_has_one_event_per_token():
    call = parse({"details": True}, stream=True)
    got = await events(
        call,
        output("hi", logprobs=[logprob(104), logprob(105)]),
        output("", finish=FinishReason.EOS, logprobs=[logprob(257)]),
    )
    assert [event["text_output"] for event in got] == ["", "hi", ""]
    assert [event["details"]["token"]["id"] for event in got] == [104, 105, 257]
    assert [event["details"]["finish_reason"] for event in got] == [None, None, "eos_token"]
    assert got[2]["details"]["token"] == {"id": 257, "text": "</s>", "logprob": -0.5, "special": True}


async def test_a_stream_with_details_may_end_without_a_token():
    call = parse({"details": True}, stream=True)
    got = await events(call, output("h", logprobs=[logprob(104)]), output("", finish=FinishReason.TIMEOUT))
    assert got[-1]["details"] == {"finish_reason": "timeout"}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([output("a"), output("", finish=FinishReason.ERROR, error="boom")], "boom"),
        ([output("a"), output("", finish=FinishReason.ERROR)], "the engine failed"),
        ([output("a"), GenerationFailed("died")], "died"),
        ([output("a"), RuntimeError("secret")], "internal error"),
        ([output("a")], "before its end"),
    ],
)
async def test_a_broken_stream_says_so(items, message):
    got = await events(parse(stream=True), *items)
    assert got[0]["text_output"] == "a"
    assert list(got[-1]) == ["error"]
    assert message in got[-1]["error"]
    assert "secret" not in str(got)


async def test_a_reader_that_leaves_stops_the_reading():
    produced = 0

    async def endless():
        nonlocal produced
        while True:
            await asyncio.sleep(0)
            produced += 1
            yield output("x")

    stream = generate.stream_events(parse(stream=True), [endless()])
    await anext(stream)
    await stream.aclose()
    at_the_end = produced
    await asyncio.sleep(0.01)
    assert produced == at_the_end
