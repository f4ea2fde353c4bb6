"""Quotas, priorities and identities through whole servers: REST, gRPC and streams, each in its own form."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import httpx
import openai
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tests.server.fake_engine import FakeEngine
from tests.server.harness import Running, serving_fake, wait_until

from carousel.cluster.kube import KubeApi

GENERATE, STREAM, PREDICT = "/v2/models/tiny/generate", "/v2/models/tiny/generate_stream", "/v1/models/tiny:predict"
INFER, COMPLETIONS = "/v2/models/tiny/infer", "/v1/completions"
CALLS: dict[str, dict[str, Any]] = {
    GENERATE: {"text_input": "a", "parameters": {"max_tokens": 2}},
    STREAM: {"text_input": "a", "parameters": {"max_tokens": 2}},
    PREDICT: {"instances": ["a"], "parameters": {"max_tokens": 2}},
    INFER: {"inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}],
            "parameters": {"max_tokens": 2}},
    COMPLETIONS: {"model": "tiny", "prompt": "a", "max_tokens": 2},
}  # fmt: skip


def tenant(name: str) -> dict[str, str]:
    return {"x-carousel-tenant": name}


@contextmanager
def server(folder: Path, policy: str, **changes: Any) -> Iterator[tuple[Running, httpx.Client]]:
    """A server on the fake engine that believes the header."""
    file = folder / "policy.yaml"
    file.write_text(policy)
    settings = {"tenant_policy": str(file), "trust_tenant_header": True, **changes}
    with (
        serving_fake(model_name="tiny", **settings) as running,
        httpx.Client(base_url=running.url, timeout=10) as client,
    ):
        yield running, client


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, httpx.Client]]:
    policy = """
priority_classes: {fast: -5, normal: 0, slow: 9}
default: {requests_per_minute: 1, priority_classes: [slow, fast]}
tenants:
  free-of-limits: {requests_per_minute: null, priority_classes: null}
  tokens: {requests_per_minute: null, tokens_per_minute: 3}
  alone: {requests_per_minute: null, concurrent_requests: 1}
"""
    with server(tmp_path_factory.mktemp("limited"), policy) as both:
        yield both


@pytest.mark.parametrize("path", CALLS)
def test_every_protocol_refuses_in_its_own_form(limited: tuple[Running, httpx.Client], path: str) -> None:
    running, client = limited
    name = f"one-{list(CALLS).index(path)}"
    assert client.post(path, json=CALLS[path], headers=tenant(name)).status_code == 200
    refused = client.post(path, json=CALLS[path], headers=tenant(name))
    assert refused.status_code == 429
    assert 50 < int(refused.headers["retry-after"]) <= 60
    assert 50 < int(refused.headers["ratelimit-reset"]) <= 60
    error = refused.json()["error"]
    message = error["message"] if path == COMPLETIONS else error
    assert f"tenant {name} has used its 1 requests a minute" in message
    if path == COMPLETIONS:
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert refused.headers["x-ratelimit-limit-requests"] == "1"
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert client.post(path, json=CALLS[path], headers=tenant(name + "-else")).status_code == 200
    assert running.engine.failure is None


def test_a_refused_tenant_s_body_is_not_even_read(limited: tuple[Running, httpx.Client]) -> None:
    _, client = limited
    client.post(GENERATE, json=CALLS[GENERATE], headers=tenant("talks"))
    assert client.post(GENERATE, content=b"no json", headers=tenant("talks")).status_code == 429
    assert client.post(GENERATE, content=b"no json", headers=tenant("new")).status_code == 422


def test_other_routes_are_open_to_who_has_no_request_left(limited: tuple[Running, httpx.Client]) -> None:
    _, client = limited
    for _ in range(2):
        client.post(GENERATE, json=CALLS[GENERATE], headers=tenant("looks"))
    for path in ("/v1/models", "/v2/models/tiny", "/metrics", "/readyz"):
        assert client.get(path, headers=tenant("looks")).status_code == 200


def test_the_openai_client_sees_what_is_left(limited: tuple[Running, httpx.Client]) -> None:
    running, _ = limited
    with openai.OpenAI(base_url=running.url + "/v1", api_key="-", max_retries=0, default_headers=tenant("oa")) as api:
        answer = api.completions.with_raw_response.create(model="tiny", prompt="a", max_tokens=2)
        assert answer.headers["x-ratelimit-limit-requests"] == "1"
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(openai.RateLimitError) as caught:
            api.completions.create(model="tiny", prompt="a")
        assert caught.value.code == "rate_limit_exceeded"


def test_answers_are_paid_in_tokens(limited: tuple[Running, httpx.Client]) -> None:
    _, client = limited
    body = {**CALLS[COMPLETIONS], "max_tokens": 30}
    answer = client.post(COMPLETIONS, json=body, headers=tenant("tokens"))
    assert answer.status_code == 200
    assert answer.headers["x-ratelimit-limit-tokens"] == "3"
    wait_until(lambda: client.post(COMPLETIONS, json=body, headers=tenant("tokens")).status_code == 429)
    refused = client.post(COMPLETIONS, json=body, headers=tenant("tokens"))
    assert "3 tokens a minute" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 500  # 31 tokens and more are owed, at three a minute


def test_a_stream_holds_its_place_until_it_ends(limited: tuple[Running, httpx.Client]) -> None:
    running, client = limited
    running.engine.delay_s = 0.05
    try:
        body = {"text_input": "a", "parameters": {"max_tokens": 1000}}
        with client.stream("POST", STREAM, json=body, headers=tenant("alone")) as stream:
            lines = stream.iter_lines()  # kept: its end would end the stream
            line = next(lines)
            assert stream.status_code == 200, line
            refused = client.post(GENERATE, json=CALLS[GENERATE], headers=tenant("alone"))
            assert refused.status_code == 429, (line, refused.text, len(running.engine.live))
            assert "has 1 requests at once, and may have 1" in refused.json()["error"]
        running.engine.delay_s = 0.0
        wait_until(lambda: client.post(GENERATE, json=CALLS[GENERATE], headers=tenant("alone")).status_code == 200)
    finally:
        running.engine.delay_s = 0.0
    two = {**CALLS[PREDICT], "instances": ["a", "b"]}
    never = client.post(PREDICT, json=two, headers=tenant("alone"))
    assert never.status_code == 400
    assert "at most 1 at once" in never.json()["error"]


def test_priorities_by_class_number_and_default(limited: tuple[Running, httpx.Client]) -> None:
    running, client = limited

    def got(name: str, **headers: str) -> Any:
        body = {**CALLS[GENERATE]}
        answer = client.post(GENERATE, json=body, headers={**tenant(name), **headers})
        return running.engine.ended[-1].request.priority if answer.status_code == 200 else answer.json()["error"]

    assert got("p1", **{"x-carousel-priority": "fast"}) == -5
    assert got("p2", **{"x-carousel-priority": "9"}) == 9
    assert got("p3") == 9  # the first of its classes
    assert "-5 (fast)" in got("p4", **{"x-carousel-priority": "7"})
    assert "or fast, normal, slow" in got("p5", **{"x-carousel-priority": "quick"})
    assert got("free-of-limits", **{"x-carousel-priority": "7"}) == 7


def infer(**parameters: int) -> Any:
    request = pb.ModelInferRequest(model_name="tiny", id="call")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    for name, value in {"max_tokens": 2, **parameters}.items():
        request.parameters[name].int64_param = value
    return request


def test_grpc_calls_and_streams(limited: tuple[Running, httpx.Client]) -> None:
    running, _ = limited
    with grpc.insecure_channel(running.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        metadata = (("x-carousel-tenant", "rpc"), ("x-carousel-priority", "fast"))
        assert stub.ModelInfer(infer(), metadata=metadata, timeout=10).outputs
        assert running.engine.ended[-1].request.priority == -5
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(infer(), metadata=metadata, timeout=10)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "tenant rpc" in caught.value.details()
        trailing = dict(caught.value.trailing_metadata())
        assert 50 < int(trailing["retry-after"]) <= int(trailing["ratelimit-reset"]) <= 60
        from carousel.grpc_messages import StreamResponse

        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
            response_deserializer=StreamResponse.FromString,
        )
        answers = list(stream(iter([infer(), infer()]), metadata=(("x-carousel-tenant", "rpc-stream"),), timeout=10))
        failed = [answer for answer in answers if answer.error_message]
        assert len(failed) == 1
        assert "has used its 1 requests a minute" in failed[0].error_message
        assert failed[0].infer_response.parameters["retry-after"].string_param


def test_a_changed_policy_counts_without_a_restart(tmp_path: Path) -> None:
    with server(tmp_path, "tenants: {a: {requests_per_minute: 1, weight: 2}}") as (running, client):
        engine: FakeEngine = running.engine
        wait_until(lambda: engine.tenant_weights == ({"a": 2.0}, 1.0))
        assert [client.post(GENERATE, json=CALLS[GENERATE], headers=tenant("a")).status_code for _ in "ab"] == [
            200,
            429,
        ]
        (tmp_path / "policy.yaml").write_text("tenants: {a: {weight: not-a-number}}")
        (tmp_path / "new").write_text("default: {weight: 0.5}\ntenants: {a: {requests_per_minute: 500, weight: 7}}")
        (tmp_path / "new").replace(tmp_path / "policy.yaml")
        wait_until(lambda: engine.tenant_weights == ({"a": 7.0}, 0.5))
        assert client.post(GENERATE, json=CALLS[GENERATE], headers=tenant("a")).status_code == 200


def test_a_server_with_a_bad_policy_does_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "policy.yaml").write_text("default: {weight: heavy}")
    settings = {"tenant_policy": str(tmp_path / "policy.yaml")}
    with serving_fake(ready=False, **settings) as running:
        assert running.thread is not None
        running.thread.join(10)
        assert running.codes == [1]
    said = capfd.readouterr().err
    assert "--tenant-policy" in said
    assert "default.weight: got 'heavy', allowed: a number from 0.001 to 1000" in said


class ReviewHandler(BaseHTTPRequestHandler):
    """An API server that knows one token."""

    good = ""
    asked: list[dict[str, Any]] = []  # noqa: RUF012 - of this handler's one test

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append({"path": self.path, **body})
        known = body["spec"]["token"] == self.good
        status = {"authenticated": known, "audiences": body["spec"]["audiences"] if known else []}
        if known:
            status["user"] = {"username": "system:serviceaccount:team-a:chat"}
        answer = json.dumps({**body, "status": status}).encode()
        self.send_response(201)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


def test_service_accounts_over_http_and_grpc(tmp_path: Path) -> None:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    made = [".".join((part({}), part({"sub": "system:serviceaccount:team-a:chat"}), end)) for end in ("ok", "bad")]
    ReviewHandler.good = made[0]
    reviewer = ThreadingHTTPServer(("127.0.0.1", 0), ReviewHandler)
    threading.Thread(target=reviewer.serve_forever, daemon=True).start()
    api = KubeApi(f"http://127.0.0.1:{reviewer.server_address[1]}", "default")
    try:
        with (
            patch.object(KubeApi, "in_cluster", lambda namespace: api),
            server(
                tmp_path, 'tenants: {gold: {service_accounts: ["team-a/*"]}}', service_account_audience="carousel"
            ) as (running, client),
        ):
            for token, status in ((made[0], 200), (made[1], 401), ("none", 401)):
                answer = client.post(
                    GENERATE, json=CALLS[GENERATE], headers={"authorization": f"Bearer {token}", **tenant("other")}
                )
                assert answer.status_code == status
            assert running.engine.ended[-1].request.tenant == "gold"
            with grpc.insecure_channel(running.grpc) as channel:
                metadata = (("authorization", f"Bearer {made[0]}"),)
                assert GRPCInferenceServiceStub(channel).ModelInfer(infer(), metadata=metadata, timeout=10).outputs
            assert running.engine.ended[-1].request.tenant == "gold"
            assert len(ReviewHandler.asked) == 2  # the second call of the good one was remembered
            assert ReviewHandler.asked[0]["path"] == "/apis/authentication.k8s.io/v1/tokenreviews"
            assert ReviewHandler.asked[0]["spec"]["audiences"] == ["carousel"]
    finally:
        reviewer.shutdown()
        reviewer.server_close()


def test_service_accounts_outside_a_cluster_are_a_clear_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("KUBERNETES_")]:
        monkeypatch.delenv(name)
    with serving_fake(ready=False, service_account_audience="x") as running:
        assert running.thread is not None
        running.thread.join(10)
        assert running.codes == [1]
    assert "--service-account-audience: KUBERNETES_SERVICE_HOST is not set" in capfd.readouterr().err
