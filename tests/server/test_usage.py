"""Usage through whole servers: the summary, the log, kill -9 in the middle, and the command that shows it all."""

from __future__ import annotations

import io
import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.server.harness import Running, serving, serving_fake, wait_until
from tests.server.overload import tiny_process

from carousel import usage_command
from carousel.ask import ServerSilent
from carousel.options import SettingsError
from carousel.telemetry.usage_log import read_log

GENERATE, STREAM = "/v2/models/tiny/generate", "/v2/models/tiny/generate_stream"
SUMMED = ("prompt_tokens", "cached_tokens", "generated_tokens", "recomputed_tokens", "device_ns", "slot_ns", "block_ns")


def body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"text_input": prompt, "parameters": {"max_tokens": tokens, "ignore_eos": True, "temperature": 0}}


def offer(running: Running, requests: int) -> None:
    """Requests of several tenants, some of whose clients leave in the middle."""
    draw = random.Random(4)

    def one(index: int) -> None:
        headers = {"x-carousel-tenant": f"t{index % 4}"}
        content = body(f"{'shared words ' * 4}{index}" if index % 2 else str(index), 4 + index % 9)
        with httpx.Client(base_url=running.url, timeout=30) as client:
            if index % 5:
                assert client.post(GENERATE, json=content, headers=headers).status_code == 200
                return
            content["parameters"]["max_tokens"] = 300
            with client.stream("POST", STREAM, json=content, headers=headers) as stream:
                for _ in zip(range(1 + draw.randrange(6)), stream.iter_lines(), strict=False):
                    pass

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(requests)))
    wait_until(lambda: running.engine.stats().live == 0)


def test_sums_of_all_tenants_are_the_engine_s_own(tmp_path: Path) -> None:
    settings = {"trust_tenant_header": True, "usage_log": str(tmp_path), "price_per_node_hour": 3.6}
    with serving(**settings) as running, httpx.Client(base_url=running.url, timeout=10) as client:
        offer(running, 60)
        found = client.get("/usage").json()
        total, engine = found["total"], found["engine"]
        assert {name: total[name] for name in SUMMED} == {name: engine[name] for name in SUMMED}
        assert total["requests"] == 60
        assert total["finish_reasons"]["cancelled"] >= 6
        assert [row["tenant"] for row in found["tenants"]] == ["t0", "t1", "t2", "t3"]
        for name in SUMMED:
            assert sum(row[name] for row in found["tenants"]) == total[name]
        assert total["cost"] == pytest.approx(total["device_ns"] * 1e-12)
        assert engine["device_seconds"] + engine["idle_seconds"] == pytest.approx(engine["elapsed_seconds"], abs=1e-3)
        text = client.get("/metrics").text
        shown = [line for line in text.splitlines() if line.startswith("carousel_tenant_device_seconds_total{")]
        assert sum(float(line.rpartition(" ")[2]) for line in shown) == pytest.approx(total["device_ns"] / 1e9)
        table = run(running.url)
        assert "t3" in table
        assert f"{total['generated_tokens']:,}" in table
        assert "that nobody is charged" in table
    entries = [entry for entry in read_log(tmp_path) if entry is not None]
    assert len(entries) == 60
    assert {name: sum(entry[name] for entry in entries) for name in SUMMED} == {name: total[name] for name in SUMMED}


def test_who_has_a_tenant_s_key_sees_that_tenant_alone(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-operator-1\nsk-gold-key-1=gold\nsk-free-key-1=free\n")
    with (
        serving_fake(model_name="tiny", api_keys=str(tmp_path / "keys")) as running,
        httpx.Client(base_url=running.url, timeout=10) as client,
    ):
        assert client.get("/usage").status_code == 401
        assert "engine" in client.get("/usage", headers={"x-api-key": "sk-operator-1"}).json()
        own = client.get("/usage", headers={"x-api-key": "sk-gold-key-1"}).json()
        assert "engine" not in own
        (tmp_path / "key").write_text("sk-operator-1\n")
        assert "total" in run(running.url, "--api-key-file", str(tmp_path / "key"))
        assert "total" in run(running.url, environ={"CAROUSEL_API_KEY": "sk-operator-1"})
        with pytest.raises(ServerSilent, match=r"401.*CAROUSEL_API_KEY"):
            run(running.url)


def run(*argv: str, environ: dict[str, str] | None = None) -> str:
    out = io.StringIO()
    assert usage_command.main(argv, environ or {}, out) == 0
    return out.getvalue()


def entry(at: str, tenant: str, tokens: int, cost: float = 0.5) -> str:
    amounts = {**dict.fromkeys(SUMMED, 0), "generated_tokens": tokens, "device_ns": 2 * 10**9}
    return json.dumps({"at": at, "id": "x", "model": "m", "tenant": tenant, "reason": "eos", "cost": cost,
                       "currency": "EUR", **amounts})  # fmt: skip


def test_a_log_is_shown_by_tenant_day_and_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        entry("2026-11-29T23:59:59.000Z", "a", 100), entry("2026-11-30T00:00:00.000Z", "a", 20),
        entry("2026-11-30T10:00:00.000Z", "b", 3), "torn {",
    ]  # fmt: skip
    (tmp_path / "usage.jsonl").write_text("\n".join(lines))
    whole = run(str(tmp_path), "--json", str(tmp_path / "out.json"))
    assert [line.split()[:5] for line in whole.splitlines()[1:3]] == [
        ["a", "2", "0", "0", "120"],
        ["b", "1", "0", "0", "3"],
    ]
    assert "cost EUR" in whole
    assert "1 lines were no entries" in capsys.readouterr().err
    assert json.loads((tmp_path / "out.json").read_text())["total"]["cost"] == 1.5
    days = run(str(tmp_path / "usage.jsonl"), "--by", "day").splitlines()
    assert [line.split()[0] for line in days[1:3]] == ["2026-11-29", "2026-11-30"]
    some = run(str(tmp_path), "--since", "2026-11-30", "--until", "2026-11-30T09:00:00Z").splitlines()
    assert [line.split()[:5] for line in some[1:2]] == [["a", "1", "0", "0", "20"]]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ((), "got 0 places"),
        (("a", "b"), "got 2 places"),
        (("x", "--since", "yesterday"), "--since: got 'yesterday'"),
        (("x", "--since", "2026-13-01"), "a day or time that there is"),
        (("http://x", "--by", "day"), "--by is for logs"),
        (("http://x", "--until", "2026-01-01"), "--until is for logs"),
        (("x", "--by", "colour"), "tenant, day, model or reason"),
    ],
)
def test_the_command_called_wrongly(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(SettingsError, match=words.replace("(", r"\(")):
        run(*argv)


def test_places_that_do_not_answer(tmp_path: Path) -> None:
    with pytest.raises(usage_command.LogUnreadable, match="No such file"):
        run(str(tmp_path / "none.jsonl"))
    with pytest.raises(ServerSilent, match="refused"):
        run("http://127.0.0.1:9")


def test_kill_9_of_a_server_under_load_leaves_a_log_that_the_next_one_goes_on_with(tmp_path: Path) -> None:
    """'What must hold' 1: everything that had ended a second before is there, and every line is one."""
    answered: list[tuple[float, str]] = []
    folder = tmp_path / "log"

    def client(url: str, stop: threading.Event, name: int) -> None:
        with httpx.Client(base_url=url, timeout=10) as http:
            for index in range(10_000):
                if stop.is_set():
                    return
                try:
                    answer = http.post(
                        GENERATE, json=body(f"{name} {index}", 2), headers={"x-request-id": f"{name}-{index}"}
                    )
                except httpx.TransportError:
                    return
                if answer.status_code == 200:
                    answered.append((time.monotonic(), f"{name}-{index}"))

    options: dict[str, object] = {
        "usage_log": folder,
        "usage_log_file_bytes": 20_000,
        "log_level": "error",
        "step_ms": 2,
    }
    stop = threading.Event()
    with tiny_process(**options) as first:
        threads = [threading.Thread(target=client, args=(first.url, stop, name)) for name in range(6)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answered) > 150, 30)
        time.sleep(1.2)  # so that some of them ended more than a second before
        first.process.kill()
        killed = time.monotonic()
        first.process.wait(10)
        for thread in threads:
            thread.join(10)
    with serving(
        usage_log=str(folder), usage_log_file_bytes=20_000
    ) as second:  # it repairs the log and goes on with it
        before = [one for one in read_log(folder) if one is not None]
        names = {one["id"].rpartition("-0-")[0].removeprefix("cmpl-") for one in before}
        missing = [name for at, name in answered if at < killed - 1.0 and name not in names]
        assert missing == []
        assert len(before) > 50
        client(second.url, stop_after(0.3), 99)
    found = list(read_log(folder))
    assert None not in found
    assert [one["id"] for one in found[: len(before)] if one] == [one["id"] for one in before]
    assert any("99-" in one["id"] for one in found[len(before) :] if one)


def stop_after(seconds: float) -> threading.Event:
    stop = threading.Event()
    threading.Timer(seconds, stop.set).start()
    return stop
