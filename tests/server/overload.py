"""Offers a server ten times what it can do, and says what became of it: ``python -m tests.server.overload --help``.

First a closed loop keeps the batch full and a few requests waiting: that is the saturated rate. Then requests come in
an open loop at ``factor`` times that rate, over every protocol. The test of the same name runs it for seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path

import grpc
import httpx
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tests.ports import free_port
from tests.server.harness import answers, wait_until

TOKENS, SEATS, QUEUE, STEP_MS = 8, 4, 8, 25.0
COMMON = {"max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
TEXT = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["abc"]}
BODIES = {
    "/v1/models/tiny:predict": {"instances": ["abc"], "parameters": COMMON},
    "/v2/models/tiny/infer": {"inputs": [TEXT], "parameters": COMMON},
    "/v2/models/tiny/generate": {"text_input": "abc", "parameters": COMMON},
    "/v2/models/tiny/generate_stream": {"text_input": "abc", "parameters": COMMON},
    "/v1/completions": {"model": "tiny", "prompt": "abc", **COMMON},
    "/openai/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], **COMMON},
}
GRPC = "grpc"


@dataclass
class Server:
    """A server process and what can be read of it from outside."""

    process: subprocess.Popen[bytes]
    http_port: int
    grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def rss(self) -> int:
        """Resident memory, bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def count(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics", timeout=30).text
        return sum(
            float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"carousel_{name}{{")
        )


@contextmanager
def tiny_process(
    http_port: int = 0, grpc_port: int = 0, environ: Mapping[str, str] | None = None, **options: object
) -> Iterator[Server]:
    """``serve_tiny.py`` with options, ready; killed at the end if it still runs."""
    ports = http_port or free_port(), grpc_port or free_port()
    words = [f"{name}={value}" for name, value in options.items()]
    script = str(Path(__file__).with_name("serve_tiny.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
    process = subprocess.Popen([sys.executable, script, *map(str, ports), *words], env=environment)
    server = Server(process, *ports)
    try:
        wait_until(lambda: process.poll() is not None or answers(server.url + "/readyz"), 60)
        assert process.poll() is None, "the server ended before it was ready"
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(10)


class Connection:
    """One kept HTTP/1.1 connection; a client that costs little beside the server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if self.streams is None:
            self.streams = await asyncio.open_connection("127.0.0.1", self.port)
        reader, writer = self.streams
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines) if name}
        if "content-length" in headers:
            content = await reader.readexactly(int(headers["content-length"]))
        else:
            content = b""
            while size := int(await reader.readline(), 16):
                content += (await reader.readexactly(size + 2))[:-2]
            await reader.readline()
        return int(first.split()[1]), headers, content

    def close(self) -> None:
        if self.streams is not None:
            self.streams[1].close()


@dataclass
class Tally:
    """What became of the requests. ``wrong`` holds what must not happen."""

    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)

    def refused(self, name: str, retry_after: str, is_error: bool) -> None:
        self.ended["refused"] += 1
        if not retry_after.isdecimal() or int(retry_after) < 1 or not is_error:
            self.wrong.append(f"{name}: refused with retry-after {retry_after!r}")
        else:
            self.waits.append(int(retry_after))


class Load:
    """Requests over every protocol in turn."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.tally = Tally()
        self._idle: list[Connection] = []
        self._names = cycle([*BODIES, GRPC])
        self._bodies = {path: json.dumps(body).encode() for path, body in BODIES.items()}
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        self._stub = GRPCInferenceServiceStub(self._channel)
        self._message = pb.ModelInferRequest(model_name="tiny")
        self._message.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"abc")
        self._message.parameters["max_tokens"].int64_param = TOKENS
        self._message.parameters["ignore_eos"].bool_param = True

    async def one(self) -> None:
        name = next(self._names)
        try:
            await (self._grpc() if name == GRPC else self._http(name))
        except Exception as error:
            self.tally.wrong.append(f"{name}: {error!r}")

    async def _http(self, path: str) -> None:
        connection = self._idle.pop() if self._idle else Connection(self.server.http_port)
        status, headers, content = await connection.post(path, self._bodies[path])
        self._idle.append(connection)
        if status == 200 and b'"error"' not in content:
            self.tally.ended["finished"] += 1
        elif status == 429:
            error = json.loads(content).get("error")
            shaped = (
                isinstance(error, str) if "/models/" in path else set(error) == {"message", "type", "param", "code"}
            )
            self.tally.refused(path, headers.get("retry-after", ""), shaped)
        else:
            self.tally.wrong.append(f"{path}: {status} {content[:200]!r}")

    async def _grpc(self) -> None:
        try:
            await self._stub.ModelInfer(self._message, timeout=120)
            self.tally.ended["finished"] += 1
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            trailing = dict(error.trailing_metadata())
            self.tally.refused(GRPC, str(trailing.get("retry-after", "")), bool(error.details()))

    async def close(self) -> None:
        for connection in self._idle:
            connection.close()
        await self._channel.close()

    async def saturate(self, seconds: float) -> float:
        """A closed loop that the queue can just hold; finished requests per second."""
        end = time.monotonic() + seconds

        async def client() -> None:
            while time.monotonic() < end:
                await self.one()

        started, before = time.monotonic(), self.tally.ended["finished"]
        await asyncio.gather(*(client() for _ in range(SEATS + QUEUE // 2)))
        return (self.tally.ended["finished"] - before) / (time.monotonic() - started)

    async def flood(self, seconds: float, rate: float) -> float:
        """An open loop of ``rate`` requests per second; finished requests per second while it lasts."""
        running: set[asyncio.Task[None]] = set()
        started, before = time.monotonic(), self.tally.ended["finished"]
        offered = 0
        while (now := time.monotonic() - started) < seconds:
            for _ in range(int(now * rate) - offered):
                offered += 1
                running.add(task := asyncio.create_task(self.one()))
                task.add_done_callback(running.discard)
            await asyncio.sleep(0.005)
        goodput = (self.tally.ended["finished"] - before) / (time.monotonic() - started)
        await asyncio.gather(*running)
        return goodput


@dataclass
class Report:
    """Rates in requests per second, memory in bytes."""

    saturated: float
    goodput: float
    offered: float
    tally: Tally
    admitted: int
    lost: int
    rss: list[int]

    def __str__(self) -> str:
        waits = f"{min(self.tally.waits)} to {max(self.tally.waits)}" if self.tally.waits else "none"
        return (
            f"saturated {self.saturated:.1f}/s, offered {self.offered:.1f}/s, goodput {self.goodput:.1f}/s "
            f"({self.goodput / self.saturated:.3f}); {dict(self.tally.ended)}, wrong {len(self.tally.wrong)}, "
            f"admitted {self.admitted}, lost {self.lost}, retry-after {waits} s, "
            f"RSS {' -> '.join(f'{self.rss[part * (len(self.rss) - 1) // 4] / 2**20:.1f}' for part in range(5))} MiB"
        )


async def measure(server: Server, seconds: float, factor: float = 10.0) -> Report:
    """Saturate for ``seconds``, then flood for ``seconds``; a short flood before warms both sides up."""
    load = Load(server)
    await load.flood(min(1.0, seconds / 4), 100.0)
    saturated = await load.saturate(seconds)
    admitted, finished = await asyncio.to_thread(server.count, "requests_admitted_total"), load.tally.ended["finished"]
    rss = [server.rss]

    async def watch() -> None:
        while True:
            await asyncio.sleep(seconds / 20)
            rss.append(server.rss)

    watching = asyncio.create_task(watch())
    goodput = await load.flood(seconds, factor * saturated)
    watching.cancel()
    await load.close()
    admitted = await asyncio.to_thread(server.count, "requests_admitted_total") - admitted
    lost = int(admitted) - (load.tally.ended["finished"] - finished)
    return Report(saturated, goodput, factor * saturated, load.tally, int(admitted), lost, rss)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the two parts (default: 60)")
    parser.add_argument("--factor", type=float, default=10.0, help="offered load over the saturated rate (default: 10)")
    arguments = parser.parse_args()
    with tiny_process(
        step_ms=STEP_MS, max_batch_sequences=SEATS, max_queue_requests=QUEUE, log_level="error"
    ) as server:
        report = asyncio.run(measure(server, arguments.seconds, arguments.factor))
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(15)
    print(report)
    for line in report.tally.wrong[:20]:
        print(f"  wrong: {line}")
    good = not report.tally.wrong and not report.lost and code == 0
    return 0 if good and report.goodput >= 0.95 * report.saturated else 1


if __name__ == "__main__":
    sys.exit(main())
