"""Tokenise and detokenise."""

from __future__ import annotations

import pytest
from protocol_fakes import BOS, EOS, MAX_LEN, VOCAB, ByteTokenizer, context

from carousel.engine.errors import InvalidRequest, RequestTooLong
from carousel.protocols.errors import UnknownModel
from carousel.protocols.tokenize import parse_detokenize, parse_tokenize

CHAT = [{"role": "user", "content": "Hi"}]


def tokenized(**body):
    return parse_tokenize(body, context()).run()


def test_a_prompt():
    answer = tokenized(prompt="Hé")
    ids = [BOS, *"Hé".encode()]
    assert answer == {"count": 4, "max_model_len": MAX_LEN, "tokens": ids, "token_strs": None}
    assert tokenized(prompt="Hé", add_special_tokens=False)["tokens"] == ids[1:]
    assert tokenized(prompt="", add_special_tokens=False) == {**answer, "count": 0, "tokens": []}


def test_token_strings():
    answer = tokenized(prompt="Hi", return_token_strs=True, model="demo")
    assert answer["token_strs"] == ["<s>", "H", "i"]


def test_messages_go_through_the_template_and_get_no_further_special_tokens():
    assert bytes(tokenized(messages=CHAT)["tokens"]) == b"<user>Hi<assistant>"
    assert bytes(tokenized(messages=CHAT, add_generation_prompt=False)["tokens"]) == b"<user>Hi"
    assert tokenized(messages=CHAT, add_special_tokens=True)["tokens"][0] == BOS


def test_template_arguments_reach_the_template():
    tokenizer = ByteTokenizer()
    parse_tokenize({"messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}}, context(tokenizer=tokenizer))
    assert tokenizer.extra == {"enable_thinking": False}


def test_more_tokens_than_the_model_takes_are_counted():
    assert tokenized(prompt="x" * (2 * MAX_LEN))["count"] == 2 * MAX_LEN + 1
    with pytest.raises(RequestTooLong):
        tokenized(prompt="x" * (200 * MAX_LEN))


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ([], "body"),
        ({}, "prompt"),
        ({"prompt": "a", "messages": CHAT}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1, 2]}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
        ({"prompt": "a", "promt": "b"}, "promt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": CHAT, "tools": [{}]}, "tools"),
        ({"messages": CHAT, "chat_template": "x"}, "chat_template"),
        ({"messages": CHAT, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_a_bad_tokenize_body_names_the_field(body, field):
    with pytest.raises(InvalidRequest) as caught:
        parse_tokenize(body, context())
    assert caught.value.field == field


def test_detokenize():
    call = parse_detokenize({"tokens": [BOS, *"Hé".encode(), EOS]}, context())
    assert call.run() == {"prompt": "<s>Hé</s>"}
    assert call.size == 5
    plain = {"tokens": [BOS, 72, EOS], "skip_special_tokens": True, "model": "demo"}
    assert parse_detokenize(plain, context()).run() == {"prompt": "H"}
    assert parse_detokenize({"tokens": []}, context()).run() == {"prompt": ""}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ("x", "body"),
        ({}, "tokens"),
        ({"tokens": None}, "tokens"),
        ({"tokens": "12"}, "tokens"),
        ({"tokens": [1, VOCAB]}, "tokens[1]"),
        ({"tokens": [-1]}, "tokens[0]"),
        ({"tokens": [True]}, "tokens[0]"),
        ({"tokens": [1.0]}, "tokens[0]"),
        ({"tokens": [1], "skip_special_tokens": 0}, "skip_special_tokens"),
        ({"token": [1], "tokens": [1]}, "token"),
    ],
)
def test_a_bad_detokenize_body_names_the_field(body, field):
    with pytest.raises(InvalidRequest) as caught:
        parse_detokenize(body, context())
    assert caught.value.field == field


@pytest.mark.parametrize(("parse", "body"), [(parse_tokenize, {"prompt": "a"}), (parse_detokenize, {"tokens": [1]})])
def test_another_model(parse, body):
    with pytest.raises(UnknownModel):
        parse({**body, "model": "other"}, context())
