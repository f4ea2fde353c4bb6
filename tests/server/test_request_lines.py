"""Ids and traces in and out on every protocol, and one line in the log for each request."""

from __future__ import annotations

import io
import json
import logging
import re

import grpc
import httpx
import pytest
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tests.server.harness import Running, serving, wait_until
from tests.server.test_life import CHAT, COMPLETION, GENERATE, INFER, PREDICT, STREAM, calls, infer_request, slow

from carousel.telemetry import logs

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
CHILD = re.compile(rf"00-{TRACE}-(?!00f067aa0ba902b7)[0-9a-f]{{16}}-01")
PATHS = [PREDICT, INFER, GENERATE, STREAM, COMPLETION, CHAT]
SECRET = "a private matter"


class Log:
    def __init__(self) -> None:
        self.stream = io.StringIO()

    def lines(self, logger: str = "carousel.access") -> list[dict]:
        found = [json.loads(line) for line in self.stream.getvalue().splitlines()]
        return [line for line in found if line["logger"] == logger]

    def line(self, request_id: str) -> dict:
        wait_until(lambda: any(line.get("request_id") == request_id for line in self.lines()))
        (line,) = [line for line in self.lines() if line.get("request_id") == request_id]
        return line


@pytest.fixture(scope="module")
def logged():
    with serving(slow, log_level="info", log_format="json") as running:
        running.log = Log()
        handler = logging.StreamHandler(running.log.stream)
        handler.setFormatter(logs.JsonFormatter())
        handler.addFilter(logs._RequestId())
        logging.getLogger().addHandler(handler)
        yield running
        logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("path", PATHS)
def test_ids_and_traces_come_back_and_stand_on_the_line(logged: Running, path: str) -> None:
    headers = {"x-request-id": f"ok-{path}", "traceparent": PARENT}
    response = httpx.post(logged.url + path, json=calls(3, SECRET)[path], headers=headers, timeout=10)
    assert response.status_code == 200
    assert response.headers["x-request-id"] == f"ok-{path}"
    assert CHILD.fullmatch(response.headers["traceparent"])
    line = logged.log.line(f"ok-{path}")
    assert line["trace_id"] == TRACE
    assert line["span_id"] in response.headers["traceparent"]
    assert (line["status"], line["finish_reason"], line["output_tokens"]) == (200, "length", 3)
    assert line["prompt_tokens"] >= len(SECRET)
    assert line["duration_ms"] >= line["ttft_ms"] > 0
    assert "prompts" not in line


@pytest.mark.parametrize("path", PATHS)
def test_so_they_do_on_errors(logged: Running, path: str) -> None:
    headers = {"x-request-id": f"bad-{path}", "traceparent": PARENT}
    response = httpx.post(logged.url + path, json=calls(3, top_p=9)[path], headers=headers, timeout=10)
    assert response.status_code in (400, 422)
    assert response.headers["x-request-id"] == f"bad-{path}"
    assert CHILD.fullmatch(response.headers["traceparent"])
    line = logged.log.line(f"bad-{path}")
    assert line["status"] == response.status_code
    assert "finish_reason" not in line


def test_grpc_does_the_same(logged: Running) -> None:
    with grpc.insecure_channel(logged.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for name, tokens in (("grpc-ok", 3), ("grpc-bad", -1)):
            metadata = (("x-request-id", name), ("traceparent", PARENT))
            call = stub.ModelInfer.future(infer_request(tokens), metadata=metadata, timeout=10)
            initial = dict(call.initial_metadata())
            assert initial["x-request-id"] == name
            assert CHILD.fullmatch(initial["traceparent"])
            code = call.code()
            line = logged.log.line(name)
            assert (line["trace_id"], line["status"]) == (TRACE, code.name)
            assert ("finish_reason" in line) is (name == "grpc-ok")
    assert logged.log.line("grpc-ok")["output_tokens"] == 3


def test_nothing_is_made_up_without_a_trace(logged: Running) -> None:
    for traceparent in (None, "00-garbage", f"00-{'0' * 32}-00f067aa0ba902b7-01"):
        headers = {"traceparent": traceparent} if traceparent else {}
        response = httpx.get(logged.url + "/livez", headers=headers, timeout=5)
        assert "traceparent" not in response.headers
        assert len(response.headers["x-request-id"]) == 32


@pytest.mark.parametrize("path", [STREAM, CHAT, GENERATE])
def test_a_client_that_left_has_a_line_with_what_it_had_used(logged: Running, path: str) -> None:
    name = f"gone-{path}"
    before = logged.engine.stats().generation_tokens
    with httpx.Client(base_url=logged.url, timeout=10) as client:
        try:
            body, headers = calls(400)[path], {"x-request-id": name}
            with client.stream(
                "POST", path, json=body, headers=headers, timeout=0.15 if path == GENERATE else 10
            ) as left:
                next(left.iter_lines())
        except httpx.ReadTimeout:
            pass
    line = logged.log.line(name)
    assert (line["status"], line["finish_reason"]) == (499, "cancelled")
    assert 0 < line["output_tokens"] < 400
    assert line["output_tokens"] == logged.engine.stats().generation_tokens - before


def test_probes_and_scrapes_are_not_worth_a_line_and_prompts_stay_out(logged: Running) -> None:
    known = len(logged.log.lines())
    for path in (
        "/livez",
        "/readyz",
        "/startupz",
        "/metrics",
        "/",
        "/v2/health/live",
        "/v2/models/tiny/ready",
        "/load",
    ):
        httpx.get(logged.url + path, timeout=5)
    assert len(logged.log.lines()) == known
    assert SECRET not in logged.log.stream.getvalue()
    logs._prompts = True  # --log-prompts
    try:
        httpx.post(logged.url + GENERATE, json=calls(1, SECRET)[GENERATE], headers={"x-request-id": "told"}, timeout=5)
    finally:
        logs._prompts = False
    assert logged.log.line("told")["prompts"] == [SECRET]
