"""A server around the fake engine: in a thread, once per module, or as a process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from tests.ports import free_port
from tests.server.harness import Running, answers, serving_fake, wait_until

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server around the fake engine. Tests may set the engine's pace: it is put back after each."""
    with serving_fake(trust_tenant_header=True) as running:
        yield running


@pytest.fixture(autouse=True)
def fresh_pace(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "server" in request.fixturenames:
        engine = request.getfixturevalue("server").engine
        engine.delay_s, engine.refuse, engine.failure, engine.alive = 0.0, None, None, True


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
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
        wait_until(lambda: self.process.poll() is not None or answers(self.url + "/readyz"))
        assert self.process.poll() is None, "the server ended before it was ready"

    def finish(self, seconds: float = 30) -> tuple[int, str]:
        """Exit code and log. It fails after ``seconds``; what a test's server must not wait for lasts longer."""
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
