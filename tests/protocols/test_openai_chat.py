"""OpenAI chat completions, checked with the client library's own models."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from protocol_fakes import ByteTokenizer, context, logprob, output, read_events, script

from carousel.engine.errors import GenerationFailed, InvalidRequest, QueueFull, RequestTooLong
from carousel.engine.request import FinishReason
from carousel.protocols import openai
from carousel.protocols.errors import RequestCancelled, RequestTimedOut, UnknownModel

USER = {"role": "user", "content": "hi"}
EOS, STOP, LENGTH = FinishReason.EOS, FinishReason.STOP, FinishReason.LENGTH


def parse(messages: Any = None, ctx=None, **body: Any):
    return openai.parse_chat({"messages": [USER] if messages is None else messages, **body}, ctx or context())


def test_messages_become_the_templates_text():
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "é"}], "name": "Ann"},
        {"role": "assistant", "content": "b", "refusal": None, "tool_calls": [], "annotations": None},
        {"role": "user", "content": ""},
    ]
    call = parse(messages)
    assert call.requests[0].prompt == "<system>be kind<user>a\né<assistant>b<user><assistant>"
    assert call.requests[0].add_special_tokens is False
    assert call.id.startswith("chatcmpl-")
    assert call.names[0]["prompt"] == "messages"


def test_template_switches():
    tokenizer = ByteTokenizer()
    call = parse(
        ctx=context(tokenizer=tokenizer),
        add_generation_prompt=False,
        chat_template_kwargs={"enable_thinking": False},
        add_special_tokens=True,
    )
    assert call.requests[0].prompt == "<user>hi"
    assert call.requests[0].add_special_tokens is True
    assert tokenizer.extra == {"enable_thinking": False}


def part(**fields):
    return [{"role": "user", "content": [fields]}]


BAD_MESSAGES = [
    ("hi", "messages", "a list of 1 to"),
    ([], "messages", "a list of 1 to"),
    ({}, "messages", "a list of 1 to"),
    ([USER] * 5000, "messages", "a list of 1 to"),
    ([USER, "hi"], "messages[1]", "an object with role and content"),
    ([{"content": "x"}], "messages[0].role", "assistant, developer, system, user"),
    ([{"role": "robot", "content": "x"}], "messages[0].role", "assistant, developer, system, user"),
    ([{"role": ["user"], "content": "x"}], "messages[0].role", "assistant"),
    (
        [{"role": "tool", "content": "x", "tool_call_id": "1"}],
        "messages[0].role",
        "tools and functions are not supported",
    ),
    ([{"role": "user"}], "messages[0].content", "a string, or"),
    ([{"role": "user", "content": None}], "messages[0].content", "a string, or"),
    ([{"role": "user", "content": 5}], "messages[0].content", "a string, or"),
    ([{"role": "user", "content": []}], "messages[0].content", "a string, or"),
    ([USER, {"role": "user", "content": "\udfff"}], "messages[1].content", "surrogates"),
    ([{"role": "user", "content": "x", "contnet": "y"}], "messages[0].contnet", "did you mean 'content'"),
    ([{"role": "user", "content": "x", "name": "n" * 129}], "messages[0].name", "128"),
    ([{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}], "messages[0].tool_calls", "not supported"),
    (part(type="image_url", image_url={"url": "x"}), "messages[0].content[0].type", "images, audio and files"),
    (part(type="input_audio"), "messages[0].content[0].type", "images, audio and files"),
    (part(text="x"), "messages[0].content[0].type", "'text'"),
    (part(type="text"), "messages[0].content[0].text", "a string"),
    (part(type="text", text=5), "messages[0].content[0].text", "a string"),
    (part(type="text", text="x", txet=5), "messages[0].content[0].txet", "did you mean"),
    ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "a part"),
    ([USER, USER], "messages", "roles must alternate"),
]


@pytest.mark.parametrize(("messages", "field", "allowed"), BAD_MESSAGES)
def test_bad_messages_are_named_with_their_place(messages, field, allowed):
    with pytest.raises(InvalidRequest) as caught:
        parse(messages)
    assert caught.value.field == field
    assert allowed in caught.value.allowed
    assert "line two" not in str(caught.value)


def test_messages_must_be_there():
    with pytest.raises(InvalidRequest) as caught:
        openai.parse_chat({}, context())
    assert caught.value.field == "messages"


def test_a_template_may_refuse_in_the_engines_own_words():
    class Refusing(ByteTokenizer):
        def apply_chat_template(self, messages, add_generation_prompt=True, **extra):
            raise InvalidRequest("messages", [messages] * 50, "something else")

    with pytest.raises(InvalidRequest) as caught:
        parse(ctx=context(tokenizer=Refusing()))
    assert (caught.value.field, caught.value.allowed) == ("messages", "something else")


def test_a_model_without_template_points_to_completions():
    with pytest.raises(InvalidRequest, match="use the completions endpoint"):
        parse(ctx=context(tokenizer=ByteTokenizer(has_chat_template=False)))


def test_a_chat_that_cannot_fit():
    with pytest.raises(RequestTooLong) as caught:
        parse([{"role": "user", "content": "x" * 20_000}])
    assert caught.value.field == "messages"


BAD_FIELDS = [
    ({"model": 5}, "model", "the name of a served model"),
    ({"stream": 1}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"stream": True, "stream_options": []}, "stream_options", "a JSON object"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "known: continuous_usage_stats"),
    ({"logprobs": 3}, "logprobs", "true or false"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs: true"),
    ({"logprobs": False, "top_logprobs": "x"}, "top_logprobs", "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"logprobs": True, "top_logprobs": True}, "top_logprobs", "0 to 20"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", ">= 1"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "without stream"),
    ({"return_token_ids": 1}, "return_token_ids", "true or false"),
    ({"add_generation_prompt": 1}, "add_generation_prompt", "true or false"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    ({"chat_template_kwargs": {"tools": True}}, "chat_template_kwargs.tools", "switches"),
    ({"chat_template_kwargs": {"a b": True}}, "chat_template_kwargs.a b", "switches"),
    ({"chat_template_kwargs": {"x": []}}, "chat_template_kwargs.x", "a number or a string"),
    ({"user": 5}, "user", "a string"),
    ({"metadata": "x"}, "metadata", "an object"),
    ({"prompt": "x"}, "prompt", "no field of this name"),
]


@pytest.mark.parametrize(("body", "field", "allowed"), BAD_FIELDS)
def test_bad_fields(body, field, allowed):
    with pytest.raises(InvalidRequest) as caught:
        parse(**body)
    assert caught.value.field == field
    assert allowed in caught.value.allowed


UNSUPPORTED = {
    "tools": [{"type": "function"}],
    "tool_choice": "required",
    "functions": [{}],
    "function_call": {"name": "f"},
    "response_format": {"type": "json_schema", "json_schema": {}},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content"},
    "web_search_options": {},
    "reasoning_effort": "high",
    "verbosity": "low",
    "store": True,
    "best_of": 2,
    "guided_json": {},
    "structured_outputs": {},
    "echo": True,
    "chat_template": "{{ x }}",
    "continue_final_message": True,
    "use_beam_search": 1,
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_is_known_but_not_supported_is_refused_by_name(name):
    with pytest.raises(InvalidRequest, match="not supported") as caught:
        parse(**{name: UNSUPPORTED[name]})
    assert caught.value.field == name


def test_what_asks_for_nothing_is_accepted():
    call = parse(
        tools=[],
        tool_choice="none",
        parallel_tool_calls=True,
        functions=None,
        response_format={"type": "text"},
        modalities=["text"],
        store=False,
        best_of=1,
        verbosity="medium",
        top_logprobs=0,
        user="me",
        metadata={"a": "b"},
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="k",
        stream=True,
        stream_options={"include_obfuscation": False},
    )
    assert call.logprobs is None
    assert not call.include_usage


def test_the_model_is_checked():
    assert parse(model="demo").context.model_name == "demo"
    with pytest.raises(UnknownModel):
        parse(model="gpt-4o")


def test_the_answer():
    call = parse(n=2, logprobs=True, top_logprobs=1, return_token_ids=True)
    tokens = [logprob(0xC3, -0.1, [(0xC3, -0.1), (105, -9.0)]), logprob(0xA9, float("-inf"))]
    results = [
        [
            output("é", finish=EOS, done=2, prompt=7, cached=4, logprobs=tokens, token_ids=[0xC3, 0xA9]),
            output("b", index=1, finish=LENGTH, done=1, prompt=7, cached=6, logprobs=[logprob(98)]),
        ]
    ]
    body = openai.render_chat(call, results)
    parsed = ChatCompletion.model_validate(body)
    assert [(c.index, c.message.content, c.finish_reason) for c in parsed.choices] == [
        (0, "é", "stop"),
        (1, "b", "length"),
    ]
    assert parsed.id == call.id
    assert parsed.model == "demo"
    assert parsed.usage
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens, parsed.usage.total_tokens) == (7, 3, 10)
    assert parsed.usage.prompt_tokens_details
    assert parsed.usage.prompt_tokens_details.cached_tokens == 4
    assert body["choices"][0]["token_ids"] == [0xC3, 0xA9]
    content = body["choices"][0]["logprobs"]["content"]
    top = [{"token": "\ufffd", "bytes": [0xC3], "logprob": -0.1}]
    assert content[0] == {"token": "\ufffd", "bytes": [0xC3], "logprob": -0.1, "top_logprobs": top}
    assert content[1] == {"token": "\ufffd", "bytes": [0xA9], "logprob": -9999.0, "top_logprobs": []}
    assert parsed.choices[1].logprobs
    assert parsed.choices[1].logprobs.content
    assert parsed.choices[1].logprobs.content[0].token == "b"


def test_the_answer_says_which_stop():
    body = openai.render_chat(parse(), [[output("a", finish=STOP, stop_reason="END")]])
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["stop_reason"] == "END"
    assert body["choices"][0]["logprobs"] is None


def test_prompt_logprobs_are_an_extension():
    call = parse(prompt_logprobs=1)
    prompt = [logprob(60, None), logprob(61, -2.0, [(65, -0.1), (66, -0.2)])]
    body = openai.render_chat(call, [[output("a", finish=EOS, prompt_logprobs=prompt)]])
    assert body["prompt_logprobs"] == [
        None,
        {
            "65": {"logprob": -0.1, "rank": 1, "decoded_token": "A"},
            "61": {"logprob": -2.0, "rank": 1, "decoded_token": "="},
        },
    ]
    ChatCompletion.model_validate(body)


@pytest.mark.parametrize(
    ("reason", "error"),
    [
        (FinishReason.TIMEOUT, RequestTimedOut),
        (FinishReason.CANCELLED, RequestCancelled),
        (FinishReason.ERROR, GenerationFailed),
        (None, GenerationFailed),
    ],
)
def test_an_answer_without_proper_end_is_an_error(reason, error):
    with pytest.raises(error, match=r"after 5 output tokens|before its end"):
        openai.render_chat(parse(), [[output("a", finish=reason, done=5)]])


async def chunks(call, *items):
    """Validated chunks, after checking that the stream ends as it must."""
    events = await read_events(openai.stream_chat(call, [script(*items)]))
    assert events.pop() == "[DONE]"
    for event in events:
        assert event["id"] == call.id
        ChatCompletionChunk.model_validate(event)
    return events


def shapes(events):
    return [(c["index"], c["delta"], c["finish_reason"]) for event in events for c in event["choices"]]


ROLE = {"role": "assistant", "content": "", "refusal": None}


async def test_a_stream_has_role_content_and_finish():
    got = await chunks(parse(stream=True), output("He"), output(""), output("llo"), output("!", finish=EOS, done=4))
    assert shapes(got) == [
        (0, ROLE, None),
        (0, {"content": "He"}, None),
        (0, {"content": "llo"}, None),
        (0, {"content": "!"}, None),
        (0, {}, "stop"),
    ]
    assert all("usage" not in event for event in got)
    assert len({(event["id"], event["created"], event["model"]) for event in got}) == 1


async def test_an_empty_answer_still_has_role_and_finish():
    assert shapes(await chunks(parse(stream=True), output("", finish=LENGTH))) == [(0, ROLE, None), (0, {}, "length")]


async def test_choices_interleave():
    items = [
        output("a", index=1),
        output("b"),
        output("c", index=1, finish=EOS, stop_reason=None),
        output("d", finish=STOP, stop_reason=7),
    ]
    got = await chunks(parse(stream=True, n=2), *items)
    assert shapes(got) == [
        (1, ROLE, None),
        (1, {"content": "a"}, None),
        (0, ROLE, None),
        (0, {"content": "b"}, None),
        (1, {"content": "c"}, None),
        (1, {}, "stop"),
        (0, {"content": "d"}, None),
        (0, {}, "stop"),
    ]
    assert got[-1]["choices"][0]["stop_reason"] == 7


async def test_the_usage_chunk_comes_last_and_is_null_before():
    call = parse(stream=True, stream_options={"include_usage": True})
    got = await chunks(call, output("a", done=1), output("b", finish=EOS, done=2, prompt=9, cached=8))
    assert [event["usage"] for event in got[:-1]] == [None] * 4
    assert got[-1]["choices"] == []
    assert got[-1]["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


async def test_usage_with_every_chunk():
    call = parse(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    got = await chunks(call, output("a", done=1), output("b", finish=EOS, done=2))
    assert [event["usage"]["completion_tokens"] for event in got] == [1, 1, 2, 2, 2]


async def test_logprobs_of_merged_deltas_and_of_text_held_back():
    call = parse(stream=True, logprobs=True, return_token_ids=True)
    got = await chunks(
        call,
        output("", token_ids=[0xC3], logprobs=[logprob(0xC3)]),
        output("éab", token_ids=[0xA9, 97, 98], logprobs=[logprob(0xA9), logprob(97), logprob(98)]),
        output("", finish=LENGTH),
    )
    contents = [c for event in got for c in event["choices"] if "content" in c["delta"] and "role" not in c["delta"]]
    assert [c["delta"]["content"] for c in contents] == ["", "éab"]
    assert [len(c["logprobs"]["content"]) for c in contents] == [1, 3]
    assert [c["token_ids"] for c in contents] == [[0xC3], [0xA9, 97, 98]]


async def broken(call, *items):
    events = await read_events(openai.stream_chat(call, [script(*items)]))
    assert events[-1] == "[DONE]"
    for event in events[:-2]:
        ChatCompletionChunk.model_validate(event)
    return events[:-2], events[-2]["error"]


@pytest.mark.parametrize(
    ("last", "code", "message"),
    [
        (output("b", finish=FinishReason.ERROR, error="boom"), "generation_failed", "boom"),
        (output("b", finish=FinishReason.TIMEOUT, done=2), "request_timeout", "after 2 output tokens"),
        (output("b", finish=FinishReason.CANCELLED, done=2), "request_cancelled", "after 2 output tokens"),
        (GenerationFailed("died"), "generation_failed", "died"),
        (QueueFull("full", 1.0), "queue_full", "full"),
        (RuntimeError("secret"), "internal_error", "internal error"),
    ],
)
async def test_a_failure_in_mid_stream_is_an_event_before_done(last, code, message):
    got, error = await broken(parse(stream=True, stream_options={"include_usage": True}), output("a"), last)
    assert error["code"] == code
    assert message in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    text = "".join(c["delta"].get("content", "") for event in got for c in event["choices"])
    assert text == ("a" if isinstance(last, Exception) else "ab")
    assert all(c["finish_reason"] is None for event in got for c in event["choices"])


async def test_a_stream_that_just_ends_is_a_failure():
    _, error = await broken(parse(stream=True, n=2), output("a", finish=EOS), output("b", index=1))
    assert "before its end" in error["message"]


def test_models():
    body = openai.models_body(context(), created=5)
    assert body["object"] == "list"
    model = Model.model_validate(body["data"][0])
    assert (model.id, model.created, model.owned_by) == ("demo", 5, "carousel")
    assert openai.model_body(context(), 5) == body["data"][0]
