"""Conformance: the ``openai`` package, sync, async and raw, against a whole server on a real (tiny) engine."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import openai
import pytest
from tests.server.tiny_server import MODEL, TinyServer, tiny_server

from carousel.engine.errors import EngineUnavailable, QueueFull

MESSAGES = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "count"}]
GREEDY = {"model": MODEL, "temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def tiny() -> Iterator[TinyServer]:
    with tiny_server() as server:
        yield server


@pytest.fixture(params=["/openai/v1", "/v1"])
def client(tiny, request) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=tiny.url + request.param, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_models(client):
    assert [(model.id, model.object, model.owned_by) for model in client.models.list()] == [
        (MODEL, "model", "carousel")
    ]
    assert client.models.retrieve(MODEL).created > 0
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_and_its_stream_say_the_same(client):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert (whole.object, whole.model, whole.choices[0].finish_reason) == ("chat.completion", MODEL, "length")
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.completion_tokens == 8
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, stream_options=options, **GREEDY))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_stream_helper_accumulates(client):
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY).choices[0].message.content
    stop = whole[4:5]  # the helper takes an answer of finish reason length for a failure
    with client.chat.completions.stream(messages=MESSAGES, stop=[stop], **GREEDY) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "chunk" in kinds
    assert final.choices[0].finish_reason == "stop"
    assert final.choices[0].message.content == whole[: whole.index(stop)]


def test_cached_tokens_are_reported(client):
    messages = [{"role": "user", "content": "a long common beginning " * 4}]
    client.chat.completions.create(messages=messages, **GREEDY)
    usage = client.chat.completions.create(messages=messages, **GREEDY).usage
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_logprobs_of_chat(client):
    answer = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == 8
    for token in tokens:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob  # greedy takes the best
        assert sum(math.exp(other.logprob) for other in token.top_logprobs) <= 1.0001
    assert bytes(byte for token in tokens for byte in token.bytes).decode("utf-8", "replace") == (
        answer.choices[0].message.content
    )
    chunks = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **GREEDY)
    streamed = [t for c in chunks for choice in c.choices if choice.logprobs for t in choice.logprobs.content]
    assert [token.token for token in streamed] == [token.token for token in tokens]


def test_several_choices_and_seeds(client):
    sampled = {**GREEDY, "temperature": 1.0}
    twice = [client.chat.completions.create(messages=MESSAGES, n=3, seed=5, **sampled) for _ in range(2)]
    texts = [[choice.message.content for choice in answer.choices] for answer in twice]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert [choice.index for choice in twice[0].choices] == [0, 1, 2]
    assert twice[0].usage.completion_tokens == 24


def test_max_completion_tokens_and_stop(client):
    asked = {"model": MODEL, "temperature": 0, "messages": MESSAGES, "extra_body": {"ignore_eos": True}}
    assert client.chat.completions.create(max_completion_tokens=3, **asked).usage.completion_tokens == 3
    whole = client.completions.create(prompt="ab", **{**GREEDY, "max_tokens": 24}).choices[0].text
    stop = whole[4:6]
    stopped = client.completions.create(prompt="ab", stop=[stop], **{**GREEDY, "max_tokens": 24}).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole[: whole.index(stop)]


def test_multi_part_text(client):
    parts = [{"type": "text", "text": "co"}, {"type": "text", "text": "unt"}]
    joined = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **GREEDY)
    plain = client.chat.completions.create(messages=[{"role": "user", "content": "co\nunt"}], **GREEDY)
    assert joined.choices[0].message.content == plain.choices[0].message.content


def test_completions_of_texts_and_token_ids(client):
    ids = list(b"abc")
    vocabulary = client.post("/tokenize", body={"prompt": "abc"}, cast_to=object)["tokens"]
    assert len(vocabulary) == len(ids)
    one = client.completions.create(prompt="abc", **GREEDY).choices[0].text
    assert client.completions.create(prompt=vocabulary, **GREEDY).choices[0].text == one
    many = client.completions.create(prompt=["abc", "xyz"], n=2, **GREEDY)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text == one
    assert client.completions.create(prompt=[vocabulary, vocabulary], **GREEDY).choices[1].text == one


def test_echo_and_logprobs_of_completions(client):
    answer = client.completions.create(prompt="abc", echo=True, logprobs=2, **GREEDY).choices[0]
    assert answer.text.startswith("abc")
    assert answer.logprobs.tokens[:3] == ["a", "b", "c"]
    assert answer.logprobs.token_logprobs[0] is None
    assert answer.logprobs.text_offset[:4] == [0, 1, 2, 3]
    assert all(1 <= len(top) <= 3 for top in answer.logprobs.top_logprobs[1:])
    chunks = client.completions.create(prompt="abc", echo=True, stream=True, **GREEDY)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == answer.text
    scored = client.completions.create(prompt="abc", echo=True, logprobs=0, **{**GREEDY, "max_tokens": 0}).choices[0]
    assert (scored.text, len(scored.logprobs.tokens)) == ("abc", 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": {}}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
        ("modalities", ["audio"]),
        ("audio", {"voice": "alloy", "format": "mp3"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("web_search_options", {}),
        ("reasoning_effort", "high"),
        ("store", True),
        ("logit_bias", {"-1": 5}),
        ("top_logprobs", 3),
        ("temperature", -1),
        ("max_tokens", 0),
        ("n", 0),
        ("unheard_of", 1),
    ],
)
def test_what_is_not_supported_is_named(client, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body={field: value})
    assert caught.value.param.startswith(field)
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "data:,"}}, {"type": "input_audio"}])
def test_images_and_audio_are_named(client, part):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])
    assert caught.value.param == "messages[0].content[0].type"


@pytest.mark.parametrize(("field", "value"), [("suffix", "x"), ("best_of", 2)])
def test_suffix_and_best_of_are_named(client, field, value):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="a", **{field: value})
    assert caught.value.param == field


def test_errors_are_the_packages_own_classes(tiny, client, monkeypatch):
    ask = {"model": MODEL, "prompt": "a"}
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x" * 600)
    assert (long.value.code, long.value.param) == ("context_length_exceeded", "prompt")
    assert "600" in long.value.message
    assert "512" in long.value.message

    def refuse(error: Exception):
        def submit(request):
            raise error

        return submit

    monkeypatch.setattr(tiny.engine, "submit", refuse(QueueFull("the queue is full", 2.5)))
    with pytest.raises(openai.RateLimitError) as full:
        client.completions.create(**ask)
    assert (full.value.response.headers["retry-after"], full.value.code) == ("3", "queue_full")
    monkeypatch.setattr(tiny.engine, "submit", refuse(EngineUnavailable("draining", 4)))
    with pytest.raises(openai.APIStatusError) as away:
        client.completions.create(**ask)
    assert (away.value.status_code, away.value.response.headers["retry-after"]) == (503, "4")


def test_a_client_that_retries_gets_through(tiny, monkeypatch):
    """The package waits for Retry-After and asks again, without its caller noticing."""
    real, refused = tiny.engine.submit, []

    def once(request):
        if not refused:
            refused.append(request)
            raise QueueFull("the queue is full", 0.1)
        return real(request)

    monkeypatch.setattr(tiny.engine, "submit", once)
    with openai.OpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=2) as client:
        assert client.completions.create(prompt="a", **GREEDY).usage.completion_tokens == 8
    assert len(refused) == 1


def test_raw_responses_have_the_headers(client):
    raw = client.chat.completions.with_raw_response.create(
        messages=MESSAGES, extra_headers={"x-request-id": "abc-1"}, **GREEDY
    )
    assert raw.headers["x-request-id"] == "abc-1"
    assert raw.headers["content-type"] == "application/json"
    parsed = raw.parse()
    assert parsed.id == "chatcmpl-abc-1"
    assert parsed._request_id == "abc-1"


def test_a_raw_stream_ends_with_done(client):
    with client.chat.completions.with_streaming_response.create(messages=MESSAGES, stream=True, **GREEDY) as raw:
        assert raw.headers["content-type"].startswith("text/event-stream")
        assert raw.headers["cache-control"] == "no-cache"
        lines = [line for line in raw.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["id"] for line in lines[:-1])


async def test_async_and_leaving_early(tiny):
    async with openai.AsyncOpenAI(base_url=tiny.url + "/v1", api_key="none", max_retries=0) as client:
        stream = await client.chat.completions.create(messages=MESSAGES, stream=True, **{**GREEDY, "max_tokens": 400})
        async for _ in stream:
            break
        await stream.close()
        answer = await client.completions.create(prompt="ab", **GREEDY)
    assert answer.usage.completion_tokens == 8
    tiny.expect_clean()


def test_tokenize_and_detokenize_where_clients_look(client):
    tokens = client.post("/tokenize", body={"model": MODEL, "prompt": "héllo"}, cast_to=object)
    assert (tokens["count"], tokens["max_model_len"]) == (6, 512)
    text = client.post("/detokenize", body={"model": MODEL, "tokens": tokens["tokens"]}, cast_to=object)
    assert text == {"prompt": "héllo"}
    chat = client.post("/tokenize", body={"messages": MESSAGES}, cast_to=object)
    usage = client.chat.completions.create(messages=MESSAGES, **GREEDY).usage
    assert chat["count"] == usage.prompt_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/tokenize", body={"prompt": 3}, cast_to=object)
    assert caught.value.param == "prompt"
