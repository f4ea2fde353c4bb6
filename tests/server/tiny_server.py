"""A whole server in this process on the real tiny engine, with a neighbour that streams while others misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
from tests.server.harness import Running, serving, wait_until

MODEL = "tiny"
CHAT, TEXT, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
PREDICT, INFER = "/v1/models/tiny:predict", "/v2/models/tiny/infer"
GENERATE, STREAM = "/v2/models/tiny/generate", "/v2/models/tiny/generate_stream"


class TinyServer(Running):
    """``address`` is for raw sockets."""

    tasks_at_rest: int

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.settings.http_port

    @property
    def connections(self) -> int:
        """TCP connections to the HTTP port that the server has open, as the system counts them."""
        port = f":{self.settings.http_port:04X}"
        lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
        return sum(1 for line in lines if line[1].endswith(port) and line[3] in ("01", "08"))  # established, close-wait

    @property
    def tasks(self) -> int:
        """Tasks on the server's event loop."""
        return len(asyncio.all_tasks(self.servers[0]._loop))

    def expect_clean(self) -> None:
        """Nothing is live, no block is held, no connection or task is left, and the books balance."""
        wait_until(lambda: self.connections == 0)
        wait_until(lambda: self.tasks <= self.tasks_at_rest)
        wait_until(lambda: self.live == 0)
        stats = self.engine.stats()
        assert stats.admitted == sum(stats.finished.values())
        wait_until(lambda: self.free_blocks == self.engine.stats().num_blocks)
        assert self.engine.failure is None
        assert self.engine.alive

    @property
    def live(self) -> int:
        stats = self.engine.stats()
        return stats.num_requests_running + stats.num_requests_waiting

    @property
    def free_blocks(self) -> int:
        """Blocks that a request could take: free, or cached and referenced by nobody."""
        stats = self.engine.stats()
        return stats.num_free_blocks + stats.num_cached_blocks


@contextlib.contextmanager
def tiny_server(**changes: Any) -> Iterator[TinyServer]:
    """A ready server without gRPC; ``changes`` are settings. Fails if it does not end cleanly."""
    settings = {"model": "tiny", "grpc": False, "log_level": "critical", **changes}
    with serving(kind=TinyServer, **settings) as running:
        wait_until(lambda: running.connections == 0)
        running.tasks_at_rest = running.tasks
        yield running
    assert not running.engine.alive  # its thread has ended


PROMPT = "the quick brown fox jumps over"
LONG = {"text_input": PROMPT, "parameters": {"temperature": 0, "max_tokens": 400, "ignore_eos": True, "details": True}}


def lone_answer(server: TinyServer) -> str:
    """What the neighbour's stream says when nobody else is there."""
    return "".join(_deltas(server, []))


def _deltas(server: TinyServer, gaps: list[float]) -> Iterator[str]:
    with httpx.Client(base_url=server.url, timeout=60) as client, client.stream("POST", STREAM, json=LONG) as stream:
        assert stream.status_code == 200
        last = time.monotonic()
        for line in stream.iter_lines():
            if line.startswith("data: "):
                gaps.append(time.monotonic() - last)
                last = time.monotonic()
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                yield event["text_output"]


class Neighbour:
    """Streams the same long answer over and over while a suite runs. ``answers`` holds each, ``gaps`` the seconds
    between events."""

    def __init__(self, server: TinyServer) -> None:
        self.server = server
        self.answers: list[str] = []
        self.gaps: list[float] = []
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self.server.live > 0)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.answers.append("".join(_deltas(self.server, self.gaps)))
                self._stop.wait(0.05)  # leaves the others a share of a small machine
        except BaseException as error:
            self.error = error

    def expect_undisturbed(self, alone: str) -> None:
        assert self.error is None
        assert self.answers
        assert set(self.answers) == {alone}
