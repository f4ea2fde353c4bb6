"""The delay between SIGTERM and the drain: whoever holds a connection is served once more and turns elsewhere."""

from __future__ import annotations

import asyncio
import signal
import socket
import time

import grpc
import httpx
import pytest
from kserve import InferenceGRPCClient, InferInput, InferRequest
from tests.server.conftest import ServerProcess, wait_until

STREAM = "/v2/models/fake/generate_stream"
GENERATE = "/v2/models/fake/generate"


def body(tokens: int) -> dict:
    return {"text_input": "a", "parameters": {"max_tokens": tokens}}


def leaving(server: ServerProcess) -> None:
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: httpx.get(server.url + "/readyz").status_code == 503)


def test_requests_are_served_on_their_connections_last(spawn):
    server = spawn(leave=30)
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=20) as kept:
        assert "connection" not in kept.post(GENERATE, json=body(1)).headers
        leaving(server)
        for path in ("/v2/models/fake/ready", "/v2/health/ready"):
            assert kept.get(path).status_code == 503
        assert kept.get("/readyz").json()["state"] == "leaving"
        assert kept.get("/livez").status_code == 200
        assert kept.get("/load").json()["draining"] is True
        assert kept.get("/startupz").status_code == 200
        assert kept.post("/v2/repository/index", json={}).json()[0]["state"] == "UNLOADING"
        for _ in range(3):
            served = kept.post(GENERATE, json=body(2))
            assert served.status_code == 200
            assert served.headers["connection"] == "close"
    server.process.send_signal(signal.SIGTERM)  # a second signal does not wait
    code, log = server.finish()
    assert code == 0, log


def test_then_idle_connections_are_closed_and_the_drain_begins(spawn):
    server = spawn(leave=0.5, drain=10, delay=0.05)
    server.wait_ready()
    with (
        httpx.Client(base_url=server.url, timeout=20) as busy,
        socket.create_connection(("127.0.0.1", server.http_port)) as idle,
    ):
        idle.settimeout(10)
        idle.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        with busy.stream("POST", STREAM, json=body(60)) as stream:
            events = stream.iter_lines()
            next(events)
            leaving(server)
            assert idle.recv(4096) == b""  # closed, and the stream goes on
            refused = httpx.post(server.url + GENERATE, json=body(1))
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert sum(line.startswith("data: ") for line in events) == 59
    code, log = server.finish()
    assert code == 0, log


@pytest.mark.skipif(not hasattr(socket, "TCP_CORK"), reason="the kernel holds nothing back here")
@pytest.mark.parametrize("leave", [30, 0])
def test_a_stream_from_before_ends_together_with_its_connection(spawn, leave):
    """Its headers could not say ``Connection: close``: a client that knows the one end must know the other too."""
    server = spawn(leave=leave, drain=20, delay=0.02)
    server.wait_ready()
    request = b'{"text_input": "a", "parameters": {"max_tokens": 20}}'
    head = (
        f"POST {STREAM} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(request)}\r\n\r\n"
    )
    connections = [socket.create_connection(("127.0.0.1", server.http_port)) for _ in range(8)]
    for connection in connections:
        connection.settimeout(10)
        connection.sendall(head.encode() + request)
        assert b"200 OK" in connection.recv(4096)
    leaving(server)
    for connection in connections:
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1)  # one by one: nothing is taken that lies behind the end
        connection.setblocking(False)
        assert connection.recv(1) == b""  # would raise if the end of the stream were not here yet
        connection.close()
    if leave:
        server.process.send_signal(signal.SIGTERM)
    code, log = server.finish()
    assert code == 0, log


def grpc_request(tokens: int) -> InferRequest:
    return InferRequest("fake", [InferInput("text_input", [1], "BYTES", [b"a"])], parameters={"max_tokens": tokens})


async def ask_until_refused(client: InferenceGRPCClient) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        await client.infer(grpc_request(1))


async def test_grpc_serves_on_and_then_sends_its_clients_away(spawn):
    server = spawn(leave=1, drain=10, delay=0.05)
    await asyncio.to_thread(server.wait_ready)
    client = InferenceGRPCClient(f"127.0.0.1:{server.grpc_port}", retries=0)
    await client.infer(grpc_request(1))
    running = asyncio.create_task(client.infer(grpc_request(60)))
    await asyncio.sleep(0.2)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(wait_until, lambda: httpx.get(server.url + "/readyz").status_code == 503)
    assert not await client.is_model_ready("fake")
    await client.infer(grpc_request(1))  # still taken
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask_until_refused(client)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # what clients and proxies try again elsewhere
    response = await running
    texts = [output for output in response.outputs if output.name == "text_output"]
    assert texts[0].as_numpy().reshape(-1)[0].decode().split()[-1] == "w59"
    await client.close()
    code, log = await asyncio.to_thread(server.finish)
    assert code == 0, log


def test_a_server_that_still_loads_does_not_wait(spawn, tmp_path):
    server = spawn(leave=60, gate=tmp_path / "never")
    wait_until(lambda: reachable(server), 15)
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0
    assert time.monotonic() - started < 10


def reachable(server: ServerProcess) -> bool:
    try:
        return httpx.get(server.url + "/livez", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
