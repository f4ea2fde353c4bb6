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
from tests.server.conftest import ServerProcess
from tests.server.harness import wait_until

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
    """The stream is not waited for longer than half of the drain: there are others to bring to an end."""
    server = spawn(leave=0.5, drain=8, delay=0.05)
    server.wait_ready()
    with (
        httpx.Client(base_url=server.url, timeout=20) as busy,
        socket.create_connection(("127.0.0.1", server.http_port)) as idle,
    ):
        idle.settimeout(10)
        idle.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        received = b""
        while b"}" not in received:
            received += idle.recv(4096)
        assert received.startswith(b"HTTP/1.1 200")
        with busy.stream("POST", STREAM, json=body(110)) as stream:
            events = stream.iter_lines()
            next(events)
            leaving(server)
            assert idle.recv(4096) == b""  # closed, and the stream goes on
            wait_until(lambda: httpx.post(server.url + GENERATE, json=body(1)).status_code == 503)
            refused = httpx.post(server.url + GENERATE, json=body(1))
            assert int(refused.headers["retry-after"]) >= 1
            assert sum(line.startswith("data: ") for line in events) == 109
    code, log = server.finish()
    assert code == 0, log


@pytest.mark.skipif(not hasattr(socket, "TCP_CORK"), reason="the kernel holds nothing back here")
def test_a_stream_that_ends_in_the_drain_ends_together_with_its_connection(spawn):
    """Its headers could not say ``Connection: close``: a client that knows the one end must know the other too."""
    server = spawn(drain=20, delay=0.02)
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
    code, log = server.finish()
    assert code == 0, log


def test_whoever_streamed_through_the_delay_is_served_once_more(spawn):
    """A client that reads a stream's end asks again at once, before it could see its connection close."""
    server = spawn(leave=0.3, drain=20, delay=0.03)
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=20) as kept:
        with kept.stream("POST", STREAM, json=body(60)) as stream:
            events = stream.iter_lines()
            next(events)
            leaving(server)
            assert sum(line.startswith("data: ") for line in events) == 59  # longer than the delay
        assert stream.headers.get("connection") != "close"
        again = kept.post(GENERATE, json=body(2))
        assert again.status_code == 200
        assert again.headers["connection"] == "close"
    code, log = server.finish()
    assert code == 0, log


def test_a_stream_without_end_does_not_keep_the_server_open(spawn):
    server = spawn(leave=0.2, drain=2, delay=0.05)
    server.wait_ready()
    with httpx.stream("POST", server.url + STREAM, json=body(4000), timeout=20) as stream:
        events = stream.iter_lines()
        next(events)
        leaving(server)
        wait_until(lambda: httpx.post(server.url + GENERATE, json=body(1)).status_code == 503)
        assert "error" in [line for line in events if line.startswith("data: ")][-1]
    code, log = server.finish()
    assert code == 0, log


def grpc_request(tokens: int) -> InferRequest:
    return InferRequest("fake", [InferInput("text_input", [1], "BYTES", [b"a"])], parameters={"max_tokens": tokens})


class Pipe:
    """A TCP proxy: which server a connection goes to is decided when it is made, as behind a Service."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.made = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.made += 1
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.port)
        await asyncio.gather(self._copy(reader, inner_writer), self._copy(inner_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
        except OSError:
            pass  # the other end sees this one close
        finally:
            writer.close()


async def test_grpc_clients_move_to_another_server_without_a_failed_call(spawn):
    """The server asks for a new connection in time; by then the load balancer gives it to another one."""
    first, second = spawn(leave=2, drain=10, delay=0.02), spawn(leave=2, drain=10, delay=0.02)
    for server in (first, second):
        await asyncio.to_thread(server.wait_ready)
    pipe = Pipe(first.grpc_port)
    proxy = await asyncio.start_server(pipe.take, "127.0.0.1")
    client = InferenceGRPCClient(f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}", retries=0)
    ended = asyncio.Event()

    async def ask() -> int:
        count = 0
        while not ended.is_set():
            await client.infer(grpc_request(3))
            count += 1
            await asyncio.sleep(0.1)  # the log of all of them has to fit its pipe
        return count

    asking = [asyncio.create_task(ask()) for _ in range(4)]
    await asyncio.sleep(0.5)
    pipe.port = second.grpc_port
    first.process.send_signal(signal.SIGTERM)
    code, log = await asyncio.to_thread(first.finish, 20)
    assert code == 0, log
    await asyncio.sleep(0.3)
    ended.set()
    assert min(await asyncio.gather(*asking)) > 1
    assert pipe.made >= 2
    await client.close()
    proxy.close()
    second.process.send_signal(signal.SIGTERM)
    code, log = await asyncio.to_thread(second.finish, 20)
    assert code == 0, log


async def test_grpc_serves_in_the_delay_and_refuses_in_the_drain(spawn):
    server = spawn(leave=2, drain=10, delay=0.05)
    await asyncio.to_thread(server.wait_ready)
    client = InferenceGRPCClient(f"127.0.0.1:{server.grpc_port}", retries=0)
    running = asyncio.create_task(client.infer(grpc_request(100)))
    await asyncio.sleep(0.3)
    server.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(wait_until, lambda: httpx.get(server.url + "/readyz").status_code == 503)
    assert not await client.is_model_ready("fake")
    await client.infer(grpc_request(1))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask_until_refused(client)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert int(dict(caught.value.trailing_metadata())["retry-after"]) >= 1
    response = await running
    texts = [output for output in response.outputs if output.name == "text_output"]
    assert texts[0].as_numpy().reshape(-1)[0].decode().split()[-1] == "w99"
    await client.close()
    code, log = await asyncio.to_thread(server.finish)
    assert code == 0, log


async def ask_until_refused(client: InferenceGRPCClient) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        await client.infer(grpc_request(1))
        await asyncio.sleep(0.1)


def test_a_server_that_still_loads_does_not_wait(spawn, tmp_path):
    server = spawn(leave=60, gate=tmp_path / "never")
    wait_until(lambda: reachable(server))
    server.process.send_signal(signal.SIGTERM)
    assert server.finish()[0] == 0


def reachable(server: ServerProcess) -> bool:
    try:
        return httpx.get(server.url + "/livez", timeout=2).status_code == 200
    except httpx.TransportError:
        return False
