"""A server with known delays that speaks everything the users speak: ``HTTP_PORT GRPC_PORT LOG [key=value ...]``.

Every answer takes ``first`` seconds to its first token and ``gap`` between tokens. ``stall=A,B``: from A to B seconds
after the first request nothing is sent. ``fail_every=N`` answers each N-th request with 503; ``queue=S`` is told as
queue time. When it has been told to end (SIGTERM), LOG holds as JSON what it sent when: ``[protocol, received, [token
times], tenant, priority]``, on the monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from aiohttp import web

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "predictor")]

from loadtest import oip  # noqa: E402

JSON = dict[str, Any]


class Fake:
    def __init__(self, first: float, gap: float, stall: tuple[float, float], fail_every: int, queue: float) -> None:
        self.first, self.gap, self.stall, self.fail_every, self.queue = first, gap, stall, fail_every, queue
        self.seen: list[list[Any]] = []
        self.refused = 0
        self.began: float | None = None

    def arrive(self, protocol: str, headers: Any) -> list[Any] | None:
        """None for a request that fails."""
        self.began = self.began or time.monotonic()
        if self.fail_every and (len(self.seen) + self.refused + 1) % self.fail_every == 0:
            self.refused += 1
            return None
        tenant, priority = headers.get("x-carousel-tenant"), headers.get("x-carousel-priority")
        record: list[Any] = [protocol, time.monotonic(), [], headers.get("authorization"), tenant, priority]
        self.seen.append(record)
        return record

    async def tokens(self, record: list[Any], count: int) -> AsyncIterator[int]:
        due = record[1]
        for place in range(count):
            due += self.gap if place else self.first
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            begin, end = self.stall
            if self.began is not None and begin <= time.monotonic() - self.began < end:
                await asyncio.sleep(end - (time.monotonic() - self.began))
            record[2].append(time.monotonic())
            yield place

    # --- HTTP

    async def models(self, request: web.Request) -> web.Response:
        if request.headers.get("authorization") == "Bearer wrong":
            return web.json_response({"error": "no such key"}, status=401)
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def metrics(self, _: web.Request) -> web.Response:
        count, total = len(self.seen), len(self.seen) * self.queue
        name = "carousel_request_queue_time_seconds"
        buckets = f'{name}_bucket{{le="1"}} {count}\n{name}_bucket{{le="+Inf"}} {count}\n'
        return web.Response(text=f"# TYPE {name} histogram\n{buckets}{name}_count {count}\n{name}_sum {total}\n")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        protocol = request.path.rsplit("/", 2)[-1] if "completions" in request.path else "generate"
        protocol = "chat" if "chat" in request.path else protocol
        record = self.arrive(protocol, request.headers)
        if record is None:
            return web.json_response({"error": {"message": "not now"}}, status=503)
        headers = {"Server-Timing": f"queue;dur={self.queue * 1000}"} if self.queue else {}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **headers})
        await response.prepare(request)
        asked = body.get("parameters") or body
        count = asked.get("max_completion_tokens") or asked["max_tokens"]  # OpenAI's newer name, which clients send
        if protocol == "chat":
            await send(response, {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        async for place in self.tokens(record, count):
            await send(response, event_of(protocol, place, place == count - 1))
        if protocol != "generate":
            usage = {"prompt_tokens": 7, "completion_tokens": count}
            await send(response, {"choices": [], "usage": usage})
            await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def infer(self, request: web.Request) -> web.Response:
        body = await request.json()
        record = self.arrive("infer", request.headers)
        if record is None:
            return web.json_response({"error": "not now"}, status=503)
        count = body["parameters"]["max_tokens"]
        async for _ in self.tokens(record, count):
            pass
        outputs = [{"name": "text_output", "data": ["x"]}, {"name": "completion_tokens", "data": [count]}]
        return web.json_response({"outputs": outputs, "parameters": {"queue_time": self.queue}})

    # --- gRPC

    async def grpc_infer(self, request: Any, context: Any) -> Any:
        record = self.arrive("grpc", dict(context.invocation_metadata()))
        if record is None:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "not now")
        count = request.parameters["max_tokens"].int64_param
        async for _ in self.tokens(record or [], count):
            pass
        if self.queue:
            context.set_trailing_metadata((("server-timing", f"queue;dur={self.queue * 1000}"),))
        return tensors(request.id, count, final=False)

    async def grpc_stream(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            record = self.arrive("grpc-stream", dict(context.invocation_metadata()))
            if record is None:
                yield oip.StreamResponse(error_message="not now")
                continue
            count = request.parameters["max_tokens"].int64_param
            async for place in self.tokens(record, count):
                response = tensors(request.id, place + 1, final=place == count - 1)
                if self.queue and place == count - 1:
                    response.parameters["queue_time"].string_param = str(self.queue)
                yield oip.StreamResponse(infer_response=response)


def event_of(protocol: str, place: int, last: bool) -> JSON:
    reason = "length" if last else None
    if protocol == "generate":
        return {"text_output": f"w{place} ", "details": {"token": {"id": place}, "finish_reason": reason}}
    choice: JSON = {"token_ids": [place], "finish_reason": reason}
    choice |= {"delta": {"content": f"w{place} "}} if protocol == "chat" else {"text": f"w{place} "}
    return {"choices": [choice]}


async def send(response: web.StreamResponse, event: JSON) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def tensors(request_id: str, completion_tokens: int, *, final: bool) -> Any:
    response = oip.InferResponse(model_name="fake", id=request_id)
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"w")
    response.outputs.add(name="completion_tokens", datatype="INT32", shape=[1]).contents.int_contents.append(
        completion_tokens
    )
    response.parameters["triton_final_response"].bool_param = final
    return response


async def main() -> None:
    http_port, grpc_port, log = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    options = dict(word.split("=", 1) for word in sys.argv[4:])
    begin, end = (float(word) for word in options.get("stall", "0,0").split(","))
    fake = Fake(
        float(options.get("first", 0.05)),
        float(options.get("gap", 0.01)),
        (begin, end),
        int(options.get("fail_every", 0)),
        float(options.get("queue", 0)),
    )
    app = web.Application()
    app.router.add_get("/v1/models", fake.models)
    app.router.add_get("/metrics", fake.metrics)
    app.router.add_post("/v1/chat/completions", fake.stream)
    app.router.add_post("/v1/completions", fake.stream)
    app.router.add_post("/v2/models/fake/generate_stream", fake.stream)
    app.router.add_post("/v2/models/fake/infer", fake.infer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", http_port).start()
    handlers = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(
            fake.grpc_infer, oip.InferRequest.FromString, oip.InferResponse.SerializeToString
        ),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
            fake.grpc_stream, oip.InferRequest.FromString, oip.StreamResponse.SerializeToString
        ),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    server.add_insecure_port(f"127.0.0.1:{grpc_port}")
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    print("ready", flush=True)
    await stop.wait()
    await asyncio.to_thread(log.write_text, json.dumps(fake.seen))
    await server.stop(0)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
