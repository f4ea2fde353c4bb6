"""A client that goes away frees its request at once, on every protocol."""

from __future__ import annotations

import asyncio
import json
import socket

import grpc
import httpx
import openai
import pytest
from kserve import InferenceGRPCClient, InferInput, InferRequest
from tests.server.harness import wait_until

from carousel.engine.request import FinishReason

LONG = 2000
TEXT = {"name": "text_input", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
BODIES = {
    "/v1/models/fake:predict": {"instances": ["a", "b"], "parameters": {"max_tokens": LONG}},
    "/v2/models/fake/infer": {"inputs": [TEXT], "parameters": {"max_tokens": LONG}},
    "/v2/models/fake/generate": {"text_input": "a", "parameters": {"max_tokens": LONG}},
    "/v2/models/fake/generate_stream": {"text_input": "a", "parameters": {"max_tokens": LONG}},
    "/v1/completions": {"model": "fake", "prompt": ["a", "b"], "max_tokens": LONG},
    "/openai/v1/completions": {"model": "fake", "prompt": ["a", "b"], "max_tokens": LONG, "stream": True},
    "/openai/v1/chat/completions": {
        "model": "fake", "messages": [{"role": "user", "content": "a"}], "max_tokens": LONG, "stream": True, "n": 2,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def slow(server):
    server.engine.delay_s = 0.01
    server.engine.ended.clear()


def expect_cancelled(server, count: int) -> None:
    wait_until(lambda: not server.engine.live)
    assert [stream.ended for stream in server.engine.ended] == [FinishReason.CANCELLED] * count


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("how", ["close", "reset"])
def test_http(server, path, how):
    body = json.dumps(BODIES[path]).encode()
    with socket.create_connection(("127.0.0.1", server.settings.http_port)) as client:
        client.sendall(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        count = 2 if '"b"' in json.dumps(BODIES[path]) else 1
        wait_until(lambda: len(server.engine.live) == count)
        if how == "reset":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
    expect_cancelled(server, count)
    assert httpx.get(server.url + "/livez").status_code == 200


def test_http_before_the_body_is_complete(server):
    with socket.create_connection(("127.0.0.1", server.settings.http_port)) as client:
        client.sendall(
            b"POST /v2/models/fake/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 500\r\n\r\n{"text_input'
        )
    assert httpx.get(server.url + "/livez").status_code == 200
    assert not server.engine.live


async def test_openai_async_client_leaves_a_stream(server):
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        stream = await client.completions.create(model="fake", prompt="a", max_tokens=LONG, stream=True)
        async for _ in stream:
            break
        await stream.close()
    await asyncio.to_thread(expect_cancelled, server, 1)


async def test_grpc_cancel(server):
    client = InferenceGRPCClient(server.grpc, retries=0)
    request = InferRequest(
        "fake", [InferInput("text_input", [2], "BYTES", [b"a", b"b"])], parameters={"max_tokens": LONG}
    )
    call = asyncio.create_task(client.infer(request))
    await asyncio.to_thread(wait_until, lambda: len(server.engine.live) == 2)
    call.cancel()
    await asyncio.to_thread(expect_cancelled, server, 2)
    await client.close()


async def test_grpc_deadline(server):
    client = InferenceGRPCClient(server.grpc, retries=0, timeout=0.3)
    request = InferRequest("fake", [InferInput("text_input", [1], "BYTES", [b"a"])], parameters={"max_tokens": LONG})
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.infer(request)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.to_thread(expect_cancelled, server, 1)
    await client.close()


async def test_grpc_connection_lost(server):
    channel = grpc.aio.insecure_channel(server.grpc)
    from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

    request = InferRequest("fake", [InferInput("text_input", [1], "BYTES", [b"a"])], parameters={"max_tokens": LONG})
    message = request.to_grpc()
    call = GRPCInferenceServiceStub(channel).ModelInfer(message)
    await asyncio.to_thread(wait_until, lambda: len(server.engine.live) == 1)
    await channel.close()
    await asyncio.to_thread(expect_cancelled, server, 1)
    assert call.cancelled()


def test_a_neighbour_is_not_disturbed(server):
    with httpx.Client(base_url=server.url, timeout=10) as client:
        for _ in range(3):
            with client.stream(
                "POST", "/v2/models/fake/generate_stream", json=BODIES["/v2/models/fake/generate"]
            ) as gone:
                next(gone.iter_lines())
                whole = {"text_input": "a", "parameters": {"max_tokens": 5}}
                assert client.post("/v2/models/fake/generate", json=whole).json()["text_output"] == "w0 w1 w2 w3 w4 "
    wait_until(lambda: not server.engine.live)
