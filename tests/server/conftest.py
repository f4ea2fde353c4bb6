"""A whole server around the fake engine, in a thread, once per module."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from tests.ports import free_port
from tests.server.fake_engine import FakeEngine, fake_factory

from carousel.config import Settings
from carousel.server import serve

HERE = Path(__file__).parent


def wait_until(condition: Callable[[], object], seconds: float = 5.0) -> None:
    """Poll; fails the test when ``condition`` stays false."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not true within {seconds} s"
        time.sleep(0.005)


@dataclass
class RunningServer:
    settings: Settings
    engines: list[FakeEngine] = field(default_factory=list)
    servers: list[object] = field(default_factory=list)

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.settings.http_port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.settings.grpc_port}"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """A server that is ready. Tests may set the engine's pace: it is put back after each."""
    settings = Settings(
        model="fake", model_name="fake", http_port=free_port(), grpc_port=free_port(), drain_seconds=1,
        max_request_bytes=1_000_000, log_level="error",
    )  # fmt: skip
    running = RunningServer(settings)
    factory = fake_factory(running.engines.append)
    codes: list[int] = []
    thread = threading.Thread(
        target=lambda: codes.append(serve(settings, engine_factory=factory, on_server=running.servers.append)),
        daemon=True,
    )
    thread.start()
    wait_until(lambda: _answers(running.url + "/readyz"), 20)
    yield running
    running.servers[0].request_stop()
    thread.join(10)
    assert codes == [0]


@pytest.fixture(autouse=True)
def fresh_pace(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        engine = request.getfixturevalue("server").engine
        engine.delay_s, engine.refuse, engine.failure, engine.alive = 0.0, None, None, True


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=10) as client:
        yield client


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    http_port: int
    grpc_port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def wait_ready(self) -> None:
        wait_until(lambda: self.process.poll() is not None or _answers(self.url + "/readyz"), 20)
        assert self.process.poll() is None, "the server ended before it was ready"

    def finish(self, seconds: float = 10) -> tuple[int, str]:
        """Exit code and log."""
        _, log = self.process.communicate(timeout=seconds)
        return self.process.returncode, log


@pytest.fixture
def spawn() -> Iterator[Callable[..., ServerProcess]]:
    """Start ``serve_fake.py`` with options; what still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(**options: object) -> ServerProcess:
        http_port, grpc_port = free_port(), free_port()
        words = [f"{name}={value}" for name, value in options.items()]
        command = [sys.executable, str(HERE / "serve_fake.py"), str(http_port), str(grpc_port), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        started.append(process)
        return ServerProcess(process, http_port, grpc_port)

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.communicate()
