"""Start the server once, run every curl call that README.md prints, and stop it.

Uses free ports in place of the README's. Each call must exit with 0 and print text that a model made; the server must
leave with 0 on SIGTERM. Prints what each call said.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ADDRESS = "127.0.0.1:8080"  # as the README prints it
MODEL = "smollm2"
READY_SECONDS = 120.0
CALL_SECONDS = 120.0
SHOWN = 1200  # characters of each answer


def calls(readme: str) -> list[str]:
    """The curl commands of the README's ``bash`` blocks, in order, each whole, with its continuation lines."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", readme, flags=re.MULTILINE | re.DOTALL)
    commands = [command for block in blocks for command in re.split(r"\n(?=curl )", block.strip())]
    return [command for command in commands if command.startswith("curl ")]


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nothing listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [item.getsockname()[1] for item in sockets]
    for item in sockets:
        item.close()
    return ports


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> float:
    """Seconds until the URL answers 200.

    Raises:
        RuntimeError: the server left, or READY_SECONDS went by.
    """
    started = time.monotonic()
    while time.monotonic() - started < READY_SECONDS:
        if server.poll() is not None:
            raise RuntimeError(f"the server left with {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(url, timeout=5) as response:
                if response.status == 200:
                    return time.monotonic() - started
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise RuntimeError(f"{url} did not answer 200 within {READY_SECONDS:.0f} s")


def run_call(command: str, address: str) -> bool:
    """Run one curl call against the server; False, and its output, if it failed or said nothing."""
    command = command.replace(ADDRESS, address).replace("curl ", "curl --fail-with-body --show-error ", 1)
    print(f"\n$ {command}", flush=True)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=CALL_SECONDS, check=False)
    said = done.stdout.strip()
    print(said if len(said) <= SHOWN else f"{said[: SHOWN // 2]}\n[...]\n{said[-SHOWN // 2 :]}")
    if done.returncode != 0 or not said or '{"error"' in done.stdout:
        print(f"FAILED with {done.returncode}: {done.stderr.strip()}", flush=True)
        return False
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent, help="where `carousel` is")
    options = parser.parse_args(argv)
    commands = calls((ROOT / "README.md").read_text("utf-8"))
    if len(commands) < 5:
        print(f"README.md prints only {len(commands)} curl calls", file=sys.stderr)
        return 1
    http_port, grpc_port = free_ports(2)
    address = f"127.0.0.1:{http_port}"
    serve = [str(options.bin / "carousel"), "serve", "--http-port", str(http_port), "--grpc-port", str(grpc_port)]
    environment = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("CAROUSEL_") or key == "CAROUSEL_CACHE_DIR"
    }
    server = subprocess.Popen(serve, env=environment)
    try:
        seconds = wait_until_ready(f"http://{address}/v2/models/{MODEL}/ready", server)
        print(f"ready after {seconds:.1f} s", flush=True)
        passed = [run_call(command, address) for command in commands]
        server.send_signal(signal.SIGTERM)
        code = server.wait(timeout=60)
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    print(f"\nREADME: {sum(passed)} of {len(passed)} calls work; the server left with {code} on SIGTERM", flush=True)
    return 0 if all(passed) and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
