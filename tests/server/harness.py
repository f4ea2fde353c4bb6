"""A whole server in a thread of this process, around any engine: mostly the real one on the tiny model."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from unittest.mock import patch

import httpx
from tests.engine.tiny import tiny_model, tiny_settings
from tests.ports import free_port
from tests.server.fake_engine import FakeEngine, fake_factory

from carousel.config import Settings
from carousel.engine.engine import Engine
from carousel.server import serve


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    """Poll; fails the test when ``condition`` stays false."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not true within {seconds} s"
        time.sleep(0.005)


class PacedRunner:
    """The engine's runner, with a least time per step and, when ``fail`` is set, an exception in the next one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.step_s = 0.0
        self.fail: Exception | None = None

    def run(self, schedule: Any) -> Any:
        started = time.monotonic()
        if self.fail is not None:
            raise self.fail
        result = self.inner.run(schedule)
        time.sleep(max(0.0, self.step_s - (time.monotonic() - started)))
        return result


class PacedEngine(Engine):
    """The real engine; ``runner`` sets its pace."""

    runner: PacedRunner

    def _build(self) -> Any:
        core = super()._build()
        self.runner = core._runner = PacedRunner(core._runner)
        self.core = core
        return core


class Running:
    """What a test holds of the server."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engines: list[Any] = []
        self.servers: list[Any] = []
        self.codes: list[int] = []
        self.thread: threading.Thread | None = None
        self.scheme = "https" if settings.tls_certificate else "http"

    @property
    def engine(self) -> Any:
        return self.engines[0]

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.settings.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.settings.grpc_port}"

    def stop(self) -> int:
        """Ask it to stop, wait, and return the exit code."""
        assert self.thread is not None
        self.servers[0].request_stop()
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server did not stop"
        return self.codes[0]


Server = TypeVar("Server", bound=Running)


def tiny_factory(keep: list[Any], step_s: float = 0.0) -> Callable[[Settings], PacedEngine]:
    """Makes the real engine on the tiny model, with at least ``step_s`` per step once it is warm."""

    def make(settings: Settings) -> PacedEngine:
        engine = PacedEngine(tiny_model(), settings)
        with patch("carousel.config.MIN_KV_CACHE_BYTES", 1):
            engine.start()
        engine.runner.step_s = step_s
        keep.append(engine)
        return engine

    return make


@contextmanager
def serving(
    factory: Callable[[list[Any]], Callable[[Settings], Any]] = tiny_factory,
    *,
    ready: bool = True,
    kind: type[Server] = Running,
    **changes: Any,
) -> Iterator[Server]:
    """A server on free ports, as a ``kind``. Unless it has ended by itself, it must end with exit code 0."""
    settings = replace(
        tiny_settings(http_port=free_port(), grpc_port=free_port(), drain_seconds=2.0, log_level="error"), **changes
    )
    running = kind(settings)
    make = factory(running.engines)
    running.thread = threading.Thread(
        target=lambda: running.codes.append(serve(settings, engine_factory=make, on_server=running.servers.append)),
        daemon=True,
    )
    running.thread.start()
    if ready:
        wait_until(lambda: running.codes or (running.servers and running.servers[0].lifecycle.ready), 60)
        assert not running.codes, "the server ended before it was ready"
        wait_until(lambda: listens(settings.http_port))
    try:
        yield running
    finally:
        if running.thread.is_alive() and running.servers:
            assert running.stop() == 0


@contextmanager
def serving_fake(prepare: Callable[[FakeEngine], None] = lambda engine: None, **changes: Any) -> Iterator[Running]:
    """A server around the fake engine, which ``prepare`` may change."""

    def factory(keep: list[Any]) -> Callable[[Settings], FakeEngine]:
        def keep_and_prepare(engine: FakeEngine) -> None:
            keep.append(engine)
            prepare(engine)

        return fake_factory(keep_and_prepare)

    small = {"drain_seconds": 1, "max_request_bytes": 1_000_000}
    with serving(factory, **{"model": "fake", "model_name": "fake", **small, **changes}) as running:
        yield running


def listens(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2):
            return True
    except OSError:
        return False


def answers(url: str, **options: Any) -> bool:
    try:
        return httpx.get(url, timeout=5, **options).status_code == 200
    except httpx.TransportError:
        return False
