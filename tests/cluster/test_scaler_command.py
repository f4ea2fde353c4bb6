"""``carousel scaler`` as a command: its settings, its exit codes, a whole life as a process, two replicas together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from typing import Any

import aiohttp
import pytest
from cluster_fakes import FakeKube, FakePod, until
from tests.ports import free_port

from carousel.cluster.scaler import Scaler
from carousel.cluster.scaler_messages import _MESSAGES
from carousel.cluster.scaler_options import ScalerOptions, load_options, scaler_help, scaler_variables
from carousel.config import SettingsError, declared_settings
from carousel.options import options_of


def problems(*argv: str, **environ: str) -> str:
    with pytest.raises(SettingsError) as refused:
        load_options(argv, environ)
    return str(refused.value)


def test_the_servers_variables_are_let_be_and_others_are_not() -> None:
    servers = {item.env: "1" for item in declared_settings() if item.env not in scaler_variables()}
    options, notices = load_options(["--pod-selector", "app=x"], {**servers, "CAROUSEL_HOST": "0.0.0.0"})
    assert options.host == "0.0.0.0"
    assert notices == []
    assert "CAROUSEL_POD_SELECTR: there is no such environment variable" in problems(CAROUSEL_POD_SELECTR="app=x")


def test_what_is_shared_with_the_server_means_the_same_kind_of_thing() -> None:
    servers = {item.env: item for item in declared_settings()}
    shared = [item for item in options_of(ScalerOptions) if item.env in servers]
    assert {item.name for item in shared} == {
        "host", "log_level", "log_format", "drain_seconds", "shutdown_delay_seconds", "max_request_bytes",
    }  # fmt: skip
    for item in shared:
        assert (item.kind, item.low, item.high) == (
            servers[item.env].kind,
            servers[item.env].low,
            servers[item.env].high,
        )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "one of the two is needed, neither is given"),
        (["--pod-selector", "app=x", "--pod-dns", "a.b"], "one of the two is needed, both are given"),
        (["--pod-dns", "a.b", "--pod-namespace", "x"], "--pod-namespace goes with --pod-selector"),
        (["--pod-dns", "a b"], "--pod-dns / CAROUSEL_POD_DNS: got 'a b'"),
        (["--pod-selector", "app=x", "--admin-port", "9095"], "two are the same"),
        (["--pod-selector", "app=x", "--stale-seconds", "1"], "at least twice --interval-seconds"),
        (["--pod-selector", "app=x", "--target-occupancy", "2"], "allowed: 0.05 to 1 share"),
        (["--pod-selector", "app=x", "extra"], "'extra': unexpected word"),
        (["--pod-selector", "app=x", "--scale-on", "cpu"], "allowed: queue-seconds, requests or tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_settings_are_named(argv: list[str], message: str) -> None:
    assert message in problems(*argv)


def test_help_has_every_flag_and_imports_little() -> None:
    for item in options_of(ScalerOptions):
        assert item.flag in scaler_help()
    code = (
        "import sys; from carousel.cli import main; main(['scaler', '--help']);"
        "import carousel.cluster.scaler;"
        "print(sorted({'torch', 'kserve', 'fastapi', 'kubernetes', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_test_s_protocol_is_the_scaler_s() -> None:
    import re
    from pathlib import Path

    text = (Path(__file__).parent / "externalscaler.proto").read_text("utf-8")
    for name, fields in _MESSAGES.items():
        body = re.search(rf"message {name} {{(.*?)}}", text)
        assert body, name
        assert len(re.findall(r"= \d+;", body[1])) == len(fields)
        for field, number, _ in fields:
            assert re.search(rf"\b{field} = {number};", body[1]), (name, field)


async def test_a_life_as_a_process() -> None:
    grpc_port, admin, proxy = free_port(), free_port(), free_port()
    async with FakePod() as pod:
        words = [
            "--pod-dns", "localhost", "--pod-port", str(pod.port), "--scaler-port", str(grpc_port),
            "--admin-port", str(admin), "--activator-port", str(proxy), "--log-format", "json",
        ]  # fmt: skip
        environ = {**os.environ, "CAROUSEL_HTTP_PORT": "8080"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "carousel.cli", "scaler", *words,
            env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            async with aiohttp.ClientSession() as session:

                async def status(url: str) -> int:
                    try:
                        async with session.get(url) as response:
                            return response.status
                    except aiohttp.ClientError:
                        return 0

                async with asyncio.timeout(30):
                    while await status(f"http://127.0.0.1:{admin}/readyz") != 200:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                async with session.post(f"http://127.0.0.1:{proxy}/v1/completions", json={"prompt": "x"}) as response:
                    assert (await response.json())["from"] == pod.port
        finally:
            process.send_signal(signal.SIGTERM)
            _, log = await asyncio.wait_for(process.communicate(), 20)
    lines = [json.loads(line) for line in log.decode().splitlines()]
    assert process.returncode == 0, lines
    assert lines[-1]["message"] == "stopped"
    assert not [line for line in lines if line["level"] in ("error", "critical")], lines


def test_a_port_that_is_taken_is_said_and_ends_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        words = ["scaler", "--pod-dns", "localhost", "--admin-port", str(port), "--scaler-port", str(free_port())]
        done = subprocess.run(
            [sys.executable, "-m", "carousel.cli", *words], capture_output=True, text=True, check=False, timeout=60
        )
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


async def test_what_one_replica_holds_the_other_tells_keda() -> None:
    async with FakeKube() as api, FakePod() as pod:

        def options(**changes: Any) -> ScalerOptions:
            return ScalerOptions(
                pod_selector="app=x", pod_namespace="models", api_server=api.url, pod_port=pod.port, scaler_port=0,
                interval_seconds=0.1, idle_seconds=1.0, peers_dns="peers", admin_port=free_port(), **changes,
            )  # fmt: skip

        one, other = Scaler(options(activator_port=free_port())), Scaler(options())

        async def both(name: str) -> list[str]:
            return [f"http://127.0.0.1:{scaler.options.admin_port}" for scaler in (one, other)]

        one.outside._resolve = other.outside._resolve = both
        stop = asyncio.Event()
        jobs = [asyncio.ensure_future(scaler.run(stop)) for scaler in (one, other)]
        try:
            await until(lambda: one.admin.ready() and other.admin.ready())
            assert not other.watcher.active()
            async with aiohttp.ClientSession() as session:
                url = f"http://127.0.0.1:{one.activator_port}/v1/completions"
                call = asyncio.ensure_future(session.post(url, json={"prompt": "x"}))
                await until(lambda: other.outside.held().requests == 1)
                assert one.watcher.active()
                assert other.watcher.active()
                api.put("a")
                assert (await call).status == 200
            await until(lambda: not other.outside.held().requests)
        finally:
            stop.set()
            await asyncio.wait_for(asyncio.gather(*jobs), 20)
