"""Runs in a pod of the cluster: steady streams to a Service, each counted as whole, refused, cut or failed.

    python load.py URL GRPC CLIENTS TOKENS MODE       MODE: kept, fresh, grpc

Every client asks for exactly TOKENS tokens, checks that so many came and that the last event says why it ended, and
asks again at once. ``kept`` clients keep their connection, and none repeats a request that failed. /tmp/stop ends it:
streams that run are read to their end, then one line of JSON says what became of all.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path

STOP = Path("/tmp/stop")


def told_to_stop() -> bool:
    return STOP.exists()


class Tally:
    """What became of the requests. ``failures``: the first ones, as text."""

    def __init__(self) -> None:
        self.ended: Counter[str] = Counter()
        self.failures: list[str] = []
        self.seconds: list[float] = []
        self.started = time.monotonic()

    def fail(self, kind: str, text: str) -> None:
        self.ended[kind] += 1
        if len(self.failures) < 20:
            self.failures.append(f"{time.monotonic() - self.started:.1f} s {kind}: {text[:200]}")

    def line(self) -> str:
        ordered = sorted(self.seconds) or [0.0]
        return json.dumps(
            {
                "ended": dict(self.ended),
                "failures": self.failures,
                "seconds": round(time.monotonic() - self.started, 1),
                "p50_s": round(ordered[len(ordered) // 2], 2),
                "max_s": round(ordered[-1], 2),
            }
        )


async def http_client(url: str, tokens: int, kept: bool, tally: Tally) -> None:
    import aiohttp

    parameters = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "details": True}
    body = {"text_input": "Once upon a time", "parameters": parameters}
    connector = aiohttp.TCPConnector(force_close=not kept, limit=1)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        while not told_to_stop():
            begun, events = time.monotonic(), 0
            try:
                async with session.post(f"{url}/v2/models/smollm2/generate_stream", json=body) as answer:
                    if answer.status != 200:
                        tally.fail(f"status {answer.status}", await answer.text())
                        await asyncio.sleep(0.2)
                        continue
                    last = ""
                    async for line in answer.content:
                        if line.startswith(b"data:"):
                            events, last = events + 1, line.decode()
                reason = (
                    json.loads(last.removeprefix("data:")).get("details", {}).get("finish_reason") if last else None
                )
                if reason == "length" and events >= tokens:
                    tally.ended["whole"] += 1
                    tally.seconds.append(time.monotonic() - begun)
                else:
                    tally.fail("cut", f"{events} of {tokens} events, the last: {last}")
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                tally.fail("cut" if events else "connection", f"{type(error).__name__}: {error}")
                await asyncio.sleep(0.2)


async def grpc_client(address: str, tokens: int, tally: Tally) -> None:
    import grpc
    from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
    from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub

    request = pb.ModelInferRequest(model_name="smollm2")
    tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    tensor.contents.bytes_contents.append(b"Once upon a time")
    request.parameters["max_tokens"].int64_param = tokens
    # A channel of its own for each client: they would share one connection otherwise.
    async with grpc.aio.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        while not told_to_stop():
            begun = time.monotonic()
            try:
                await stub.ModelInfer(request, timeout=300)
                tally.ended["whole"] += 1
                tally.seconds.append(time.monotonic() - begun)
            except grpc.aio.AioRpcError as error:
                tally.fail(error.code().name, error.details() or "")
                await asyncio.sleep(0.2)


async def main(url: str, address: str, clients: int, tokens: int, mode: str) -> None:
    tally = Tally()
    print(f"{clients} clients", flush=True)
    if mode == "grpc":
        work = [grpc_client(address, tokens, tally) for _ in range(clients)]
    else:
        work = [http_client(url, tokens, mode == "kept", tally) for _ in range(clients)]
    await asyncio.gather(*work)
    print(tally.line(), flush=True)


if __name__ == "__main__":
    target, grpc_target, count, length, how = sys.argv[1:]
    asyncio.run(main(target, grpc_target, int(count), int(length), how))
