"""The server under test: ``carousel serve`` in a process of its own, on free ports of 127.0.0.1."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

HOST = "127.0.0.1"
READY_SECONDS = 180.0


class SoakError(RuntimeError):
    """The soak could not be run at all."""


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on now."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


class Server:
    """One server process. Use as a context: what still runs at its end is killed.

    Args:
        flags: of ``carousel serve``, without ports.
        log: where its log goes.
    """

    def __init__(self, flags: Sequence[str], log: IO[bytes]) -> None:
        self.http_port, self.grpc_port = free_ports(2)
        self.words = ["serve", "--host", HOST, "--trust-tenant-header", *flags]
        ports = ["--http-port", str(self.http_port), "--grpc-port", str(self.grpc_port)]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("CAROUSEL_")}
        if "CAROUSEL_CACHE_DIR" in os.environ:
            kept["CAROUSEL_CACHE_DIR"] = os.environ["CAROUSEL_CACHE_DIR"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "carousel.cli", *self.words, *ports], stdout=log, stderr=log, env=kept
        )
        self.log = Path(log.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.http_port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_ready(self) -> float:
        """Seconds until the server was ready.

        Raises:
            SoakError: it left, or took too long.
        """
        started = time.monotonic()
        while time.monotonic() - started < READY_SECONDS:
            if self.process.poll() is not None:
                end = self.log.read_text("utf-8", "replace")[-2000:]
                raise SoakError(f"the server left with {self.process.returncode} before it was ready:\n{end}")
            try:
                with urllib.request.urlopen(self.url + "/readyz", timeout=5) as response:
                    if response.status == 200:
                        return time.monotonic() - started
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        raise SoakError(f"the server was not ready within {READY_SECONDS:.0f} s")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def wait(self, seconds: float) -> int | None:
        """The exit code, or None when the process still runs after ``seconds``."""
        try:
            return await asyncio.to_thread(self.process.wait, seconds)
        except subprocess.TimeoutExpired:
            return None

    def complaints(self, most: int = 20) -> list[str]:
        """Lines of the log that say ``error`` or worse, or hold a traceback: a healthy server writes none."""
        wrong = re.compile(r'"level":"(error|critical)"|Traceback \(most recent call last\)|\b(ERROR|CRITICAL)\b')
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return [line[:2000] for line in lines if wrong.search(line)][:most]
