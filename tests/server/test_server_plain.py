"""V1, generate, health, the gated repository, limits and request ids, with a plain HTTP client."""

from __future__ import annotations

import json
import socket

import httpx
import pytest

from carousel.engine.errors import EngineUnavailable, QueueFull

JSON = {"content-type": "application/json"}
PREDICT, GENERATE, STREAM = "/v1/models/fake:predict", "/v2/models/fake/generate", "/v2/models/fake/generate_stream"


def events(text: str) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]


def test_v1_predict(client):
    body = {"instances": ["a", {"prompt": "b", "parameters": {"max_tokens": 2}}], "parameters": {"max_tokens": 3}}
    response = client.post(PREDICT, json=body)
    assert response.status_code == 200
    assert [item["text"] for item in response.json()["predictions"]] == ["w0 w1 w2 ", "w0 w1 "]


def test_v1_predict_takes_a_charset(client):
    """KServe hands such a body to the model undecoded."""
    headers = {"content-type": "application/json; charset=utf-8"}
    assert client.post(PREDICT, content=b'{"instances": ["a"]}', headers=headers).status_code == 200


def test_v1_models_and_readiness(client):
    assert client.get("/v1/models").json()["models"] == ["fake"]
    card = client.get("/v1/models/fake").json()
    assert (card["name"], card["ready"]) == ("fake", True)
    assert client.get("/v1/models/other").status_code == 404


@pytest.mark.parametrize("path", ["", "/versions/1"])
def test_generate(client, path):
    response = client.post(
        f"/v2/models/fake{path}/generate", json={"text_input": "a", "parameters": {"max_tokens": 2, "details": True}}
    )
    assert response.status_code == 200
    body = response.json()
    assert (body["text_output"], body["model_name"], body["model_version"]) == ("w0 w1 ", "fake", "1")
    assert body["details"]["finish_reason"] == "length"


@pytest.mark.parametrize("path", ["", "/versions/1"])
def test_generate_stream(client, path):
    body = {"text_input": "a", "parameters": {"max_tokens": 3}}
    response = client.post(f"/v2/models/fake{path}/generate_stream", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert "".join(event["text_output"] for event in events(response.text)) == "w0 w1 w2 "


def test_generate_streams_as_it_goes(server):
    server.engine.delay_s = 0.1
    with httpx.stream("POST", server.url + STREAM, json={"text_input": "a", "parameters": {"max_tokens": 5}}) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line)
        assert len(server.engine.live) == 1  # the first event came before the last token was made
        assert sum(line != "" for line in lines) == 4


@pytest.mark.parametrize("path", [PREDICT, GENERATE, STREAM])
def test_overload_and_drain(server, client, path):
    body = {"instances": ["a"]} if path == PREDICT else {"text_input": "a"}
    server.engine.refuse = QueueFull("full", 0.2)
    response = client.post(path, json=body)
    assert (response.status_code, response.headers["retry-after"], response.json()) == (429, "1", {"error": "full"})
    server.engine.refuse = EngineUnavailable("draining", 9)
    response = client.post(path, json=body)
    assert (response.status_code, response.headers["retry-after"], response.json()) == (503, "9", {"error": "draining"})


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        (PREDICT, b"{", 400, "body"),
        (PREDICT, b"[]", 400, "body"),
        (PREDICT, b"{}", 400, "instances"),
        (
            PREDICT,
            b'{"instances": [{"prompt": "a", "parameters": {"top_p": 7}}]}',
            400,
            "instances[0].parameters.top_p",
        ),
        (GENERATE, b"{", 422, "body"),
        (GENERATE, b"{}", 422, "text_input"),
        (GENERATE, b'{"text_input": "a", "parameters": {"top_p": 7}}', 422, "parameters.top_p"),
        (STREAM, b'{"text_input": 3}', 422, "text_input"),
        ("/v2/models/other/generate", b'{"text_input": "a"}', 404, "other"),
        ("/v2/models/fake/versions/7/generate", b'{"text_input": "a"}', 404, "versions/7"),
        ("/v1/models/other:predict", b'{"instances": ["a"]}', 404, "other"),
        ("/v1/models/fake:explain", b'{"instances": ["a"]}', 501, "explainer"),
        ("/nowhere", b"{}", 404, "Not Found"),
        ("/livez", b"{}", 405, "Method Not Allowed"),
    ],
)
def test_errors_name_what_is_wrong(client, path, body, status, named):
    response = client.post(path, content=body, headers=JSON)
    assert response.status_code == status, response.text
    assert named in response.json()["error"]


def test_openai_paths_answer_errors_in_their_form(client):
    for path in ("/openai/v1/chat/completions", "/v1/completions", "/openai/v1/nowhere"):
        error = client.post(path, content=b"{", headers=JSON).json()["error"]
        assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("path", [PREDICT, GENERATE, "/v2/models/fake/infer", "/v1/completions"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_body_is_413_and_not_read(server, path, chunked):
    limit = server.settings.max_request_bytes
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {limit + 1}"
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.settings.http_port), timeout=5) as client:
        client.sendall(head.encode())
        if chunked:
            for _ in range(limit // 50_000 + 2):
                client.sendall(b"c350\r\n" + b" " * 50_000 + b"\r\n")
        answer = client.recv(1000)
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"connection: close" in answer


@pytest.mark.parametrize("path", [PREDICT, GENERATE, "/v2/models/fake/infer", "/v1/completions"])
def test_another_content_type_is_415(client, path):
    response = client.post(path, content=b"<x/>", headers={"content-type": "text/xml"})
    assert response.status_code == 415
    assert "text/xml" in response.text


def test_health(server, client):
    """kserve#6259: health stayed 200 after the engine had died."""
    for path in ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/fake/ready", "/"):
        assert client.get(path).status_code == 200
    server.engine.failure = "the device fell off"
    for path in ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready", "/v2/models/fake/ready", "/"):
        assert client.get(path).status_code == 503, path
    assert client.get("/livez").json()["reason"] == "the device fell off"
    response = client.post(GENERATE, json={"text_input": "a"})
    assert response.status_code == 503
    assert "the device fell off" in response.json()["error"]
    server.engine.failure = None
    server.engine.alive = False  # stuck
    assert client.get("/livez").status_code == 503


def test_version(client):
    version = client.get("/version").json()
    assert {"version", "python", "torch", "kserve", "model"} <= set(version)


def test_unload_is_refused_unless_it_is_allowed(client):
    response = client.post("/v2/repository/models/fake/unload")
    assert response.status_code == 403
    assert "--allow-unload" in response.json()["error"]
    assert client.get("/v2/models/fake/ready").status_code == 200
    assert client.post("/v2/repository/models/fake/load").json() == {"name": "fake", "load": True}
    assert client.post("/v2/repository/models/other/unload").status_code == 404


def test_request_ids_go_in_and_out(client):
    assert client.get("/livez", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    made_up = client.get("/livez", headers={"x-request-id": "two words"}).headers["x-request-id"]
    assert len(made_up) == 32
    answer = client.post("/v1/completions", json={"prompt": "a", "model": "fake"}, headers={"x-request-id": "abc-2"})
    assert "abc-2" in answer.json()["id"]
    assert client.post(GENERATE, content=b"{", headers=JSON).headers["x-request-id"]


def test_one_connection_serves_many_requests(client):
    for _ in range(5):
        assert client.post(GENERATE, json={"text_input": "a"}).status_code == 200
        assert client.post(STREAM, json={"text_input": "a"}).status_code == 200
        assert client.post(GENERATE, content=b"{", headers=JSON).status_code == 422
