"""Runs a job on llama.cpp: its server with 32 slots over HTTP, or, for one request at a time, its llama-bench.

python run_llama.py JOB FOLDER, with the folder of llama.cpp's programs. Needs nothing but Python.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

from job import Job, Pass, Record, answer, read_job  # type: ignore[import-not-found]

_SLOTS = 32
_START_SECONDS = 60.0


class Server:
    """llama-server on a free port of this machine, until the block ends."""

    def __init__(self, job: Job, folder: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        context = _SLOTS * (job.longest // 64 + 1) * 64
        self._command = [
            *(str(folder / "llama-server"), "--model", job.model, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--threads", str(job.threads), "--threads-batch", str(job.threads)),
            *("--ctx-size", str(context), "--parallel", str(_SLOTS), "--cont-batching", "--no-webui"),
        ]
        self._environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + _START_SECONDS
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1):
                    return self
            except OSError:
                time.sleep(0.2)
        self.__exit__()
        raise SystemExit(f"llama-server was not ready in {_START_SECONDS:.0f} s")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)


async def _events(port: int, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """POST to /completion; the events of its chunked answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = f"POST /completion HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n".encode() + content)
    try:
        status = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status.split(b"\r\n")[0]:
            raise SystemExit(f"llama-server: {status!r} {(await reader.read())[:500]!r}")
        text = b""
        while size := int(await reader.readline(), 16):
            text += await reader.readexactly(size)
            await reader.readline()
            *lines, text = text.split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
    finally:
        writer.close()


async def _serve(port: int, one: Pass) -> list[Record]:
    start = time.perf_counter()

    async def ask(number: int) -> Record:
        request = one.requests[number]
        await asyncio.sleep(max(0.0, start + request.at - time.perf_counter()))
        body = {
            "prompt": request.prompt, "n_predict": request.output, "temperature": 0.0, "ignore_eos": True,
            "cache_prompt": False, "stream": True, "return_tokens": True,
        }  # fmt: skip
        record = Record(request.at)
        left = request.output
        async for event in _events(port, body):
            count = min(left, len(event.get("tokens") or []))
            if count:
                record.deltas.append((time.perf_counter() - start, count))
                left -= count
        if left and record.deltas:  # tokens whose text was not whole yet come with the last event, uncounted
            record.deltas.append((time.perf_counter() - start, left))
        return record

    return list(await asyncio.gather(*(ask(number) for number in range(len(one.requests)))))


def alone(job: Job, folder: Path, one: Pass) -> list[Record]:
    """One request at a time as llama-bench measures it: decoding behind the prompt, in-process, without HTTP."""
    request = one.requests[0]
    command = [
        *(str(folder / "llama-bench"), "--model", job.model, "--threads", str(job.threads), "--output", "json"),
        *("--n-prompt", "0", "--n-gen", str(request.output), "--n-depth", str(len(request.prompt))),
        *("--repetitions", str(len(one.requests))),
    ]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"LD_LIBRARY_PATH": str(folder)}
    )
    seconds = request.output / json.loads(done.stdout)[0]["avg_ts"]
    step = seconds / request.output
    return [
        Record(number * seconds, [(number * seconds + step * (place + 1), 1) for place in range(request.output)])
        for number in range(len(one.requests))
    ]


def main() -> None:
    job, folder = read_job(sys.argv[1]), Path(sys.argv[2])

    def run(one: Pass) -> list[Record]:
        if one.concurrency:
            return alone(job, folder, one)
        with Server(job, folder) as server:
            return asyncio.run(_serve(server.port, one))

    answer(job, run)


if __name__ == "__main__":
    main()
