"""The OpenAI routes with OpenAI's own client, sync and async."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest
from tests.server.harness import Running

from carousel.engine.errors import EngineUnavailable, QueueFull

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "count"}]


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/openai/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client):
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=3)
    assert answer.choices[0].message.content == "w0 w1 w2 "
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens == len("system: be brief\nuser: count\n")
    assert answer.model == "fake"


def test_chat_stream_joins_to_the_whole_answer_and_reports_usage(client):
    chunks = list(
        client.chat.completions.create(
            model="fake", messages=MESSAGES, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "w0 w1 w2 w3 "
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].usage.completion_tokens == 4
    assert len({c.id for c in chunks}) == 1


def test_chat_with_several_choices(client):
    answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=2, n=3)
    assert [(c.index, c.message.content) for c in answer.choices] == [(i, "w0 w1 ") for i in range(3)]


def test_completions_of_many_prompts(client):
    answer = client.completions.create(model="fake", prompt=["a", "bc"], max_tokens=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "w0 w1 "), (1, "w0 w1 ")]
    assert answer.usage.prompt_tokens == 3


def test_completions_stream_of_many_prompts(client):
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model="fake", prompt=["a", "b"], max_tokens=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "w0 w1 w2 ", 1: "w0 w1 w2 "}


def test_models(client):
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_the_plain_prefix_serves_chat_too(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=1)
        assert answer.choices[0].message.content == "w0 "
        assert client.completions.create(model="fake", prompt="a", max_tokens=1).choices[0].text == "w0 "


async def test_async_streams_side_by_side(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/openai/v1", api_key="none", max_retries=0) as client:

        async def one(tokens: int) -> str:
            text = ""
            stream = await client.chat.completions.create(
                model="fake", messages=MESSAGES, max_tokens=tokens, stream=True
            )
            async for chunk in stream:
                text += chunk.choices[0].delta.content or ""
            return text

        texts = await asyncio.gather(*(one(n) for n in range(1, 9)))
    assert texts == ["".join(f"w{i} " for i in range(n)) for n in range(1, 9)]


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=MESSAGES)
    assert caught.value.code == "model_not_found"


def test_a_bad_field_is_named(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_too_long_is_400_with_the_numbers(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="fake", prompt="x" * 5000)
    assert caught.value.code == "context_length_exceeded"
    assert "4096" in caught.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_with_retry_after_before_any_stream(server, client, stream):
    server.engine.refuse = QueueFull("the queue is full", 6.2)
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="fake", messages=MESSAGES, stream=stream)
    assert caught.value.response.headers["retry-after"] == "7"
    assert caught.value.code == "queue_full"


def test_an_unavailable_engine_is_503_with_retry_after(server, client):
    server.engine.refuse = EngineUnavailable("draining", 3)
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="fake", prompt="a")
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "3"


def test_an_engine_failure_in_the_middle_of_a_stream_is_an_error_event(server, client):
    server.engine.delay_s = 0.02
    stream = client.chat.completions.create(model="fake", messages=MESSAGES, max_tokens=500, stream=True)
    next(stream)
    server.engine.failure = "boom"
    with pytest.raises(openai.APIError, match="boom"):
        list(stream)
