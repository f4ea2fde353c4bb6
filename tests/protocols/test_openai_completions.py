"""OpenAI text completions, checked with the client library's own models."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Completion
from protocol_fakes import BOS, EOS, VOCAB, context, logprob, output, read_events, script

from carousel.engine.errors import GenerationFailed, InvalidRequest, RequestTooLong
from carousel.engine.request import FinishReason
from carousel.protocols import openai
from carousel.protocols.common import MAX_PROMPTS

LENGTH, STOP, END = FinishReason.LENGTH, FinishReason.STOP, FinishReason.EOS


def parse(prompt: Any = "hi", **body: Any):
    return openai.parse_completion({"prompt": prompt, **body}, context())


@pytest.mark.parametrize(
    ("prompt", "prompts", "paths"),
    [
        ("a", ["a"], ["prompt"]),
        ("", [""], ["prompt"]),
        (["a", "b"], ["a", "b"], ["prompt[0]", "prompt[1]"]),
        ([1, 2], [[1, 2]], ["prompt"]),
        ([[1], [2, 3]], [[1], [2, 3]], ["prompt[0]", "prompt[1]"]),
        (["a", [1]], ["a", [1]], ["prompt[0]", "prompt[1]"]),
    ],
)
def test_every_form_of_prompt(prompt, prompts, paths):
    call = parse(prompt)
    assert [request.prompt for request in call.requests] == prompts
    assert [names["prompt"] for names in call.names] == paths
    assert len({request.request_id for request in call.requests}) == len(prompts)
    assert call.id.startswith("cmpl-")
    assert call.requests[0].add_special_tokens is True


BAD = [
    ({}, "prompt", "a string, a list of token ids"),
    ({"prompt": None}, "prompt", "a string, a list of token ids"),
    ({"prompt": 5}, "prompt", "a string, a list of token ids"),
    ({"prompt": []}, "prompt", "a string, a list of token ids"),
    ({"prompt": {}}, "prompt", "a string, a list of token ids"),
    ({"prompt": ["a"] * (MAX_PROMPTS + 1)}, "prompt", "1 to 2048"),
    ({"prompt": [[]]}, "prompt[0]", "a non-empty list"),
    ({"prompt": ["a", 5]}, "prompt[1]", "a string, or"),
    ({"prompt": [1, "a"]}, "prompt[1]", "token ids"),
    ({"prompt": [1, VOCAB]}, "prompt[1]", "from 0 to 257"),
    ({"prompt": [[1], [2, -1]]}, "prompt[1][1]", "from 0 to 257"),
    ({"prompt": [True]}, "prompt[0]", "a string, or"),
    ({"prompt": ["a", "\ud800"]}, "prompt[1]", "surrogates"),
    ({"prompt": "a", "echo": 1}, "echo", "true or false"),
    ({"prompt": "a", "suffix": "x"}, "suffix", "not supported"),
    ({"prompt": "a", "best_of": 3}, "best_of", "not supported"),
    ({"prompt": "a", "logprobs": True}, "logprobs", "0 to 20"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "0 to 20"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens", ">= 1"),
    ({"prompt": "a", "echo": True, "max_tokens": False}, "max_tokens", ">= 1"),
    ({"prompt": "a", "messages": []}, "messages", "no field of this name"),
    ({"prompt": "a", "tools": []}, "tools", "no field of this name"),
    ({"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "without stream"),
]


@pytest.mark.parametrize(("body", "field", "allowed"), BAD)
def test_bad_bodies(body, field, allowed):
    with pytest.raises(InvalidRequest) as caught:
        openai.parse_completion(body, context())
    assert caught.value.field == field
    assert allowed in caught.value.allowed


def test_too_many_token_ids():
    with pytest.raises(RequestTooLong) as caught:
        parse([[1], [1] * 101])
    assert caught.value.field == "prompt[1]"


def test_the_answer_numbers_choices_over_all_prompts():
    call = parse(["a", "b"], n=2, return_token_ids=True)
    results = [
        [output(f"{w}{i}", index=i, finish=LENGTH, done=2, prompt=5 + w, cached=i) for i in range(2)] for w in range(2)
    ]
    body = openai.render_completion(call, results)
    parsed = Completion.model_validate(body)
    assert [(c.index, c.text, c.finish_reason) for c in parsed.choices] == [
        (0, "00", "length"),
        (1, "01", "length"),
        (2, "10", "length"),
        (3, "11", "length"),
    ]
    assert parsed.usage
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens) == (11, 8)
    assert parsed.usage.prompt_tokens_details
    assert parsed.usage.prompt_tokens_details.cached_tokens == 0
    assert body["choices"][0]["token_ids"] == [48, 48]


def test_logprobs_have_exact_offsets_over_split_characters_and_special_tokens():
    call = parse(logprobs=1)
    tokens = [
        logprob(97, -0.1, [(97, -0.1), (98, -3.0)]),
        logprob(EOS, -0.2, [(97, -0.15)]),
        logprob(0xC3),
        logprob(0xA9),
        logprob(98),
    ]
    body = openai.render_completion(call, [[output("aéb", finish=LENGTH, logprobs=tokens)]])
    Completion.model_validate(body)
    got = body["choices"][0]["logprobs"]
    assert got["tokens"] == ["a", "</s>", "\ufffd", "\ufffd", "b"]
    assert got["text_offset"] == [0, 1, 1, 1, 2]
    assert got["token_logprobs"] == [-0.1, -0.2, -0.5, -0.5, -0.5]
    assert got["top_logprobs"][0] == {"a": -0.1}
    assert got["top_logprobs"][1] == {"a": -0.15, "</s>": -0.2}
    shown = parse(logprobs=1, skip_special_tokens=False)
    body = openai.render_completion(shown, [[output("a</s>éb", finish=LENGTH, logprobs=tokens)]])
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 1, 5, 5, 6]


def test_echo_repeats_the_prompt():
    call = parse(["hé", [BOS, 97]], echo=True)
    assert call.echoes == ["hé", "a"]
    body = openai.render_completion(call, [[output("x", finish=STOP)], [output("y", finish=STOP)]])
    assert [choice["text"] for choice in body["choices"]] == ["héx", "ay"]
    assert [request.sampling.prompt_logprobs for request in call.requests] == [None, None]


PROMPT_LOGPROBS = [logprob(BOS, None), logprob(104, -1.0, [(104, -1.0)]), logprob(105, -2.0)]


def test_echo_with_logprobs_scores_the_prompt():
    call = parse("hi", echo=True, logprobs=1)
    assert call.requests[0].sampling.prompt_logprobs == 1
    result = output("ab", finish=LENGTH, prompt_logprobs=PROMPT_LOGPROBS, logprobs=[logprob(97), logprob(98)], done=2)
    choice = openai.render_completion(call, [[result]])["choices"][0]
    assert choice["text"] == "hiab"
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i", "a", "b"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1, 2, 3]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][:2] == [None, {"h": -1.0}]
    assert "prompt_logprobs" not in choice


def test_echo_counts_special_tokens_that_the_prompt_itself_spells():
    call = parse("<s>h", echo=True, logprobs=0)
    prompt = [logprob(BOS, None), logprob(BOS), logprob(104)]
    result = output("", finish=LENGTH, prompt_logprobs=prompt, logprobs=[logprob(97)])
    offsets = openai.render_completion(call, [[result]])["choices"][0]["logprobs"]["text_offset"]
    assert offsets == [0, 3, 3, 4]


def test_echo_without_scores_starts_the_offsets_behind_the_prompt():
    call = parse("hi", echo=True, logprobs=0)
    body = openai.render_completion(call, [[output("a", finish=LENGTH, logprobs=[logprob(97)])]])
    assert body["choices"][0]["logprobs"]["text_offset"] == [2]


def test_max_tokens_zero_only_scores_the_prompt():
    call = parse("hi", echo=True, logprobs=1, max_tokens=0, return_token_ids=True)
    assert call.requests[0].sampling.max_tokens == 1
    result = output("z", finish=END, prompt_logprobs=PROMPT_LOGPROBS, logprobs=[logprob(122)], done=1, stop_reason=7)
    body = openai.render_completion(call, [[result]])
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("hi", "length", [])
    assert choice["logprobs"]["tokens"] == ["<s>", "h", "i"]
    assert choice["stop_reason"] is None
    assert (body["usage"]["completion_tokens"], body["usage"]["prompt_tokens"]) == (0, 3)


def test_prompt_logprobs_are_an_extension():
    call = parse("hi", prompt_logprobs=0)
    body = openai.render_completion(call, [[output("x", finish=LENGTH, prompt_logprobs=PROMPT_LOGPROBS)]])
    assert [None if p is None else list(p) for p in body["choices"][0]["prompt_logprobs"]] == [None, ["104"], ["105"]]
    assert body["choices"][0]["logprobs"] is None


def test_an_answer_without_proper_end_is_an_error():
    with pytest.raises(GenerationFailed):
        openai.render_completion(parse(), [[output("a", finish=FinishReason.ERROR)]])


async def events_of(call, *scripts):
    events = await read_events(openai.stream_completion(call, [script(*items) for items in scripts]))
    assert events.pop() == "[DONE]"
    return events


def choices(events):
    return [(c["index"], c["text"], c["finish_reason"]) for event in events for c in event["choices"]]


async def test_a_stream():
    call = parse(stream=True)
    got = await events_of(call, [output("a"), output(""), output("b", finish=END, stop_reason=3)])
    for event in got:
        assert event["object"] == "text_completion"
        # the library's model demands a reason in every chunk; OpenAI's service sends null, and so do we
        Completion.model_validate({**event, "choices": [{**c, "finish_reason": "stop"} for c in event["choices"]]})
    assert choices(got) == [(0, "a", None), (0, "b", "stop")]
    assert got[-1]["choices"][0]["stop_reason"] == 3


async def test_streams_of_several_prompts_interleave():
    call = parse(["a", "b"], n=2, stream=True, stream_options={"include_usage": True})
    got = await events_of(
        call,
        [output("00", finish=END, done=1), output("01", index=1, finish=END, done=1)],
        [output("10", finish=END, done=2, prompt=4), output("11", index=1, finish=LENGTH, done=3, prompt=4)],
    )
    assert sorted(choices(got)) == [(0, "00", "stop"), (1, "01", "stop"), (2, "10", "stop"), (3, "11", "length")]
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["prompt_tokens"] == 7
    assert got[-1]["usage"]["completion_tokens"] == 7


async def test_a_stream_with_echo_and_logprobs_equals_the_whole():
    call = parse("hi", echo=True, logprobs=0, stream=True, return_token_ids=True)
    deltas = [
        output("", token_ids=[0xC3], logprobs=[logprob(0xC3)], prompt_logprobs=PROMPT_LOGPROBS),
        output("é", token_ids=[0xA9], logprobs=[logprob(0xA9)]),
        output("", token_ids=[], finish=LENGTH, done=2),
    ]
    got = await events_of(call, deltas)
    parts = [c for event in got for c in event["choices"]]
    whole = output("é", finish=LENGTH, prompt_logprobs=PROMPT_LOGPROBS, logprobs=[logprob(0xC3), logprob(0xA9)])
    expected = openai.render_completion(call, [[whole]])["choices"][0]
    assert "".join(part["text"] for part in parts) == expected["text"] == "hié"
    for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [x for part in parts if part["logprobs"] for x in part["logprobs"][key]] == expected["logprobs"][key]
    assert [part["token_ids"] for part in parts] == [[0xC3], [0xA9], []]


async def test_a_stream_of_nothing_but_the_echo():
    call = parse("hi", echo=True, max_tokens=0, stream=True, stream_options={"include_usage": True})
    got = await events_of(call, [output("z", finish=END, done=1)])
    assert choices(got) == [(0, "hi", "length")]
    assert got[-1]["usage"]["completion_tokens"] == 0


async def test_one_failing_prompt_ends_the_stream_with_its_error():
    call = parse(["a", "b"], stream=True)
    got = await events_of(call, [output("x")] * 50, [output("y", finish=FinishReason.ERROR, error="boom")])
    assert got[-1]["error"]["message"] == "boom"
