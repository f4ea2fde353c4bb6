"""Every field of every REST protocol with every kind of bad value, beside a stream that must not notice."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from tests.server.bad_values import PROTOCOLS, Protocol
from tests.server.tiny_server import Neighbour, TinyServer, lone_answer, tiny_server

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def tiny() -> Iterator[TinyServer]:
    with tiny_server() as running:
        yield running
        running.expect_clean()


@pytest.fixture(scope="module")
def neighbour(tiny: TinyServer) -> Iterator[Neighbour]:
    alone = lone_answer(tiny)
    with Neighbour(tiny) as beside:
        yield beside
    beside.expect_undisturbed(alone)


@pytest.fixture(scope="module")
def client(tiny: TinyServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.url, timeout=20) as client:
        yield client


def message_of(path: str, response: httpx.Response) -> str:
    """The error's text, after a look at its form."""
    body = response.json()
    assert set(body) == {"error"}, body
    if path.startswith(("/v1/chat", "/v1/completions", "/tokenize", "/detokenize")):
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return str(body["error"]["message"])
    assert isinstance(body["error"], str)
    return body["error"]


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_bad_field_is_refused_by_name(name: str, client: httpx.Client, neighbour: Neighbour) -> None:
    protocol = PROTOCOLS[name]
    wrong = list(failures(protocol, client))
    assert not wrong, "\n".join(wrong)


def failures(protocol: Protocol, client: httpx.Client) -> Iterator[str]:
    for case, body, named in protocol.cases():
        response = client.post(protocol.path, content=body, headers=JSON)
        expected = (404,) if named == "model" else (protocol.invalid,)
        if named == "model":
            expected = (404, protocol.invalid)
        text = message_of(protocol.path, response) if response.status_code >= 400 else response.text[:100]
        if response.status_code not in expected:
            yield f"{case}: {response.status_code} {text[:200]}"
        elif named not in text or not ("allowed:" in text or "served:" in text) or len(text) > 1000:
            yield f"{case}: does not name {named}: {text[:300]}"


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_good_body_is_good(name: str, client: httpx.Client) -> None:
    protocol = PROTOCOLS[name]
    assert client.post(protocol.path, content=protocol.body(), headers=JSON).status_code == 200
