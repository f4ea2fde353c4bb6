"""Starts the fake server and locust, each in a process of its own: locust patches the standard library."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0
_FAKE = Path(__file__).with_name("fake_server.py")


def _environment() -> dict[str, str]:
    """Without what would change locust's options."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCUST_", "LOADTEST_"))}
    return kept | {"NO_PROXY": "*", "OMP_NUM_THREADS": "1"}


@dataclass
class Server:
    """The fake server; ``sent`` is there when it has ended."""

    http: int
    grpc: int
    log: Path

    @property
    def sent(self) -> list[list[Any]]:
        return json.loads(self.log.read_text())


@contextmanager
def fake_server(folder: Path, *options: str) -> Iterator[Server]:
    server = Server(free_port(), free_port(), folder / "sent.json")
    words = [sys.executable, str(_FAKE), str(server.http), str(server.grpc), str(server.log), *options]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=_environment())
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10)
        finally:
            process.kill()


@dataclass
class Ended:
    """How a run of locust ended. ``report`` is what ``--tokens-json`` wrote."""

    code: int
    out: str
    err: str
    report: dict[str, Any]

    def row(self, name: str = "all") -> dict[str, Any]:
        return self.report["rows"][name]


def start(server: Server | None, *options: str) -> subprocess.Popen[str]:
    where = [] if server is None else ["--host", f"http://127.0.0.1:{server.http}"]
    if server is not None:
        where += ["--grpc-target", f"127.0.0.1:{server.grpc}"]
    words = [sys.executable, "-m", "loadtest", *where, *options]
    return subprocess.Popen(
        words, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str], report: Path | None = None) -> Ended:
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"locust did not end: {out[-2000:]} {err[-4000:]}") from None
    read = json.loads(report.read_text()) if report is not None and report.exists() else {}
    return Ended(process.returncode, out, err, read)


def run(server: Server | None, folder: Path, *options: str) -> Ended:
    """A whole test, headless."""
    report = folder / "tokens.json"
    report.unlink(missing_ok=True)
    words = ("--headless", "--only-summary", "--tokens-json", str(report), *options)
    return finish(start(server, *words), report)


def wait_for(what: Any, seconds: float = PATIENCE_S) -> Any:
    """The first true value of ``what()``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if value := what():
                return value
        except OSError:
            pass
        time.sleep(0.1)
    raise AssertionError("it did not come")
