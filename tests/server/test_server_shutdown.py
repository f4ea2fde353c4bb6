"""Start-up and shutdown of a real process: early port, SIGTERM, second signal, failures and their exit codes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
from kserve import InferenceGRPCClient, InferInput, InferRequest
from tests.server.harness import wait_until

STREAM = "/v2/models/fake/generate_stream"
GENERATE = "/v2/models/fake/generate"


def body(tokens: int) -> dict:
    return {"text_input": "a", "parameters": {"max_tokens": tokens}}


def lines(log: str) -> list[dict]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]


def test_sigterm_lets_requests_finish_and_refuses_new_ones(spawn):
    """kserve#3375, #5496: 502s and cut streams after SIGTERM. ``/metrics`` and kept connections live on meanwhile."""
    server = spawn(delay=0.05, drain=8)
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=60) as kept, httpx.Client(base_url=server.url, timeout=60) as other:
        assert kept.get("/livez").status_code == 200
        with other.stream("POST", STREAM, json=body(40)) as stream:
            events = stream.iter_lines()
            assert next(events).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: kept.get("/readyz").status_code == 503)
            for path in ("/v2/models/fake/ready", "/v2/health/ready"):
                assert kept.get(path).status_code == 503
            assert kept.get("/livez").status_code == 200
            assert "carousel_draining{" in kept.get("/metrics").text
            assert httpx.get(server.url + "/metrics").status_code == 200  # a new connection
            refused = kept.post(GENERATE, json=body(1))
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.headers["connection"] == "close"
            assert refused.json() == {"error": "the server is shutting down"}
            assert sum(line.startswith("data: ") for line in events) == 39
    code, log = server.finish()
    assert code == 0, log
    assert "drained" in [line["message"] for line in lines(log)]
    assert not [line for line in lines(log) if line["level"] in ("error", "critical")], log


def test_requests_that_outlast_the_drain_end_with_a_clean_error_event(spawn):
    server = spawn(delay=0.05, drain=0.5)
    server.wait_ready()
    with httpx.stream("POST", server.url + STREAM, json=body(4000), timeout=60) as stream:
        events = stream.iter_lines()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        last = [line for line in events if line.startswith("data: ")][-1]
    assert "error" in json.loads(last.removeprefix("data: "))
    code, log = server.finish()
    assert code == 0, log


def test_a_non_streaming_request_that_outlasts_the_drain_gets_an_answer(spawn):
    server = spawn(delay=0.05, drain=0.3)
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        timer = subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -TERM {server.process.pid}"])
        answer = client.post(GENERATE, json=body(4000))
        timer.wait()
    assert answer.status_code in (500, 503)
    assert answer.json()["error"]
    assert server.finish()[0] == 0


def test_a_second_signal_is_quick(spawn):
    server = spawn(delay=0.05, drain=60)
    server.wait_ready()
    with httpx.stream("POST", server.url + STREAM, json=body(4000), timeout=60) as stream:
        events = stream.iter_lines()
        next(events)
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(server.url + "/readyz").status_code == 503)
        server.process.send_signal(signal.SIGTERM)
        list(events)
    assert server.finish()[0] == 0


async def test_grpc_drains_like_http(spawn):
    server = spawn(delay=0.05, drain=8)
    await asyncio.to_thread(server.wait_ready)
    client = InferenceGRPCClient(f"127.0.0.1:{server.grpc_port}", retries=0)

    def request(tokens: int) -> InferRequest:
        return InferRequest("fake", [InferInput("text_input", [1], "BYTES", [b"a"])], parameters={"max_tokens": tokens})

    running = asyncio.create_task(client.infer(request(30)))
    await asyncio.sleep(0.3)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    assert not await client.is_model_ready("fake")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.infer(request(1))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert int(dict(caught.value.trailing_metadata())["retry-after"]) >= 1
    response = await running
    texts = [output for output in response.outputs if output.name == "text_output"]
    assert texts[0].as_numpy().reshape(-1)[0].decode().startswith("w0 w1 ")
    await client.close()
    code, log = await asyncio.to_thread(server.finish)
    assert code == 0, log


def test_the_log_has_the_requests_and_not_their_prompts(spawn):
    server = spawn()
    server.wait_ready()
    secret = "a very private prompt"
    for path, sent in (
        (GENERATE, {"text_input": secret}),
        (GENERATE, {"text_input": secret, "parameters": {"top_p": 9}}),
        ("/v1/models/fake:predict", {"instances": [secret]}),
        ("/v1/chat/completions", {"model": "fake", "messages": [{"role": "user", "content": secret}], "stream": True}),
    ):
        httpx.post(server.url + path, json=sent, headers={"x-request-id": "id-7"})
    server.process.send_signal(signal.SIGTERM)
    _, log = server.finish()
    assert secret not in log
    served = [line for line in lines(log) if line["logger"] == "carousel.access"]
    assert [line["status"] for line in served] == [200, 422, 200, 200]
    assert {line["request_id"] for line in served} == {"id-7"}


def test_an_idle_server_stops_at_once(spawn):
    server = spawn(drain=60)
    server.wait_ready()
    with httpx.Client(base_url=server.url) as idle:  # an open connection holds nothing up
        idle.get("/livez")
        server.process.send_signal(signal.SIGINT)
        assert server.finish()[0] == 0


def test_the_port_opens_before_the_model_is_loaded(spawn, tmp_path):
    """kserve#3113: traffic before load."""
    server = spawn(gate=tmp_path / "gate")
    wait_until(lambda: reachable(server.url))
    assert httpx.get(server.url + "/livez").status_code == 200
    assert httpx.get(server.url + "/metrics").status_code == 200
    not_ready = httpx.get(server.url + "/v2/models/fake/ready")
    assert (not_ready.status_code, not_ready.headers["retry-after"]) == (503, "5")
    refused = httpx.post(server.url + GENERATE, json=body(1))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "loading" in refused.json()["error"]
    (tmp_path / "gate").touch()
    server.wait_ready()
    assert httpx.post(server.url + GENERATE, json=body(1)).status_code == 200
    server.process.send_signal(signal.SIGTERM)
    code, log = server.finish()
    assert code == 0
    assert any(line["message"].startswith("ready in ") for line in lines(log))


def test_sigterm_while_loading(spawn, tmp_path):
    server = spawn(gate=tmp_path / "never")
    wait_until(lambda: reachable(server.url))
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0


def test_a_failed_load_says_why_and_exits_1(spawn):
    server = spawn(fail="no such model: nowhere")
    code, log = server.finish(20)
    assert code == 1
    assert any("no such model: nowhere" in line["message"] for line in lines(log) if line["level"] == "critical")


def test_a_taken_port_says_so_and_exits_1():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        script = str(Path(__file__).parent / "serve_fake.py")
        for ports, flag in (((port, 1), "--http-port"), ((0, port), "--grpc-port")):
            done = subprocess.run(
                [sys.executable, script, *map(str, ports)], capture_output=True, text=True, timeout=30, check=False
            )
            assert done.returncode == 1
            assert flag in done.stderr


def reachable(url: str) -> bool:
    try:
        httpx.get(url + "/livez", timeout=2)
    except httpx.TransportError:
        return False
    return True
