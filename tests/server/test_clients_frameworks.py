"""Conformance: ``langchain-openai`` and ``litellm``, which applications put on top of the OpenAI routes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import openai
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI, OpenAI
from tests.server.tiny_server import MODEL, TinyServer, tiny_server

from carousel.engine.errors import QueueFull

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:pydantic.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:litellm.*"),
]
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "count"}]
GREEDY = {"temperature": 0, "max_tokens": 8}
MORE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def tiny() -> Iterator[TinyServer]:
    with tiny_server() as server:
        yield server


@pytest.fixture(scope="module")
def expected(tiny) -> str:
    """What the model says to the question of these tests."""
    with openai.OpenAI(base_url=tiny.url + "/v1", api_key="none") as client:
        answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, **GREEDY, extra_body=MORE)
    return answer.choices[0].message.content


# LangChain


@pytest.fixture
def chat(tiny) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=tiny.url + "/v1", api_key="none", max_retries=0, extra_body=MORE, **GREEDY)


QUESTION = [SystemMessage("be brief"), HumanMessage("count")]


def test_langchain_invoke(chat, expected):
    answer = chat.invoke(QUESTION)
    assert answer.content == expected
    assert answer.usage_metadata["output_tokens"] == 8
    assert answer.response_metadata["finish_reason"] == "length"


def test_langchain_stream(chat, expected):
    chunks = list(chat.stream(QUESTION, stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == expected
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 8


def test_langchain_batch(chat, expected):
    answers = chat.batch([QUESTION, [HumanMessage("other")], QUESTION])
    assert [answers[0].content, answers[2].content] == [expected, expected]


async def test_langchain_async(chat, expected):
    assert (await chat.ainvoke(QUESTION)).content == expected
    assert "".join([chunk.content async for chunk in chat.astream(QUESTION)]) == expected


def test_langchain_logprobs(chat):
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    tokens = answer.response_metadata["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in tokens] == [2] * 8


def test_langchain_completions(tiny):
    llm = OpenAI(model=MODEL, base_url=tiny.url + "/v1", api_key="none", max_retries=0, extra_body=MORE, **GREEDY)
    whole = llm.invoke("ab")
    assert len(whole) > 0
    assert "".join(llm.stream("ab")) == whole
    assert [generations[0].text for generations in llm.generate(["ab", "ab"]).generations] == [whole, whole]


def test_langchain_structured_output_and_tools_are_refused_by_name(chat):
    with pytest.raises(openai.BadRequestError, match="response_format"):
        chat.with_structured_output({"title": "x", "type": "object", "properties": {}}, method="json_schema").invoke(
            "a"
        )
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}]).invoke("a")


# litellm


@pytest.fixture(scope="module")
def litellm() -> ModuleType:
    """It takes seconds to import, and would fetch its price list from the network meanwhile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        return importlib.import_module("litellm")


@pytest.fixture
def complete(litellm, tiny) -> Callable[..., Any]:
    def ask(**more):
        options = {"messages": MESSAGES, "extra_body": MORE, "max_retries": 0, **GREEDY, **more}
        return litellm.completion(model=f"openai/{MODEL}", api_base=tiny.url + "/v1", api_key="none", **options)

    return ask


def test_litellm_completion(complete, expected):
    answer = complete()
    assert answer.choices[0].message.content == expected
    assert answer.usage.completion_tokens == 8


def test_litellm_stream(complete, expected):
    chunks = list(complete(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [8]


async def test_litellm_async(litellm, tiny, expected):
    answer = await litellm.acompletion(
        model=f"openai/{MODEL}", api_base=tiny.url + "/openai/v1", api_key="none", extra_body=MORE, **GREEDY,
        messages=MESSAGES,
    )  # fmt: skip
    assert answer.choices[0].message.content == expected


def test_litellm_text_completion(litellm, tiny):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{MODEL}", api_base=tiny.url + "/v1", api_key="none", prompt="ab", **GREEDY
    )
    assert answer.choices[0].text


def test_litellm_errors(litellm, complete, tiny, monkeypatch):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        complete(temperature=-1)
    with pytest.raises(litellm.ContextWindowExceededError):
        complete(messages=[{"role": "user", "content": "x" * 600}])

    def refuse(request):
        raise QueueFull("the queue is full", 2)

    monkeypatch.setattr(tiny.engine, "submit", refuse)
    with pytest.raises(litellm.RateLimitError, match="the queue is full"):
        complete()
