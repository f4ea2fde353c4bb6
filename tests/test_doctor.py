"""``carousel doctor`` names the right limit of engines that are limited on purpose, and says what to change to what."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from tests.engine.tiny import kv_memory, started_engine
from tests.server.harness import serving, wait_until

from carousel import doctor_command
from carousel.ask import ServerSilent
from carousel.doctor import COLUMNS, SETTINGS, Diagnosis, Run, TimelineUnreadable, diagnose, timeline_of
from carousel.engine.engine import Engine
from carousel.engine.request import GenerationRequest, SamplingParams
from carousel.options import SettingsError


class Slow:
    """The engine's runner on a machine for which a token has its price, so that no other load on this one counts."""

    def __init__(self, inner: Any, base_s: float, token_s: float) -> None:
        self.inner, self.base_s, self.token_s = inner, base_s, token_s

    def run(self, schedule: Any) -> Any:
        result = self.inner.run(schedule)
        time.sleep(self.base_s + self.token_s * schedule.num_tokens)
        return result


class PricedEngine(Engine):
    def _build(self) -> Any:
        core = super()._build()
        core._runner = Slow(core._runner, 0.002, 0.0001)
        return core


@asynccontextmanager
async def engine(**settings: Any) -> AsyncIterator[Engine]:
    """A real engine on the tiny model, on a machine that is the same whatever else this one does."""
    with patch("tests.engine.tiny.Engine", PricedEngine):
        running = started_engine(**settings)
    try:
        yield running
    finally:
        await asyncio.to_thread(running.stop)


def look(engine: Engine) -> Diagnosis:
    stats = engine.stats()
    timeline = timeline_of(
        list(engine.timeline.steps), engine.settings, stats.num_slots, stats.num_blocks, time.monotonic(), "tiny"
    )
    return diagnose(Run(json.loads(json.dumps(timeline))))


def request(prompt_tokens: int, tokens: int, salt: int = 0) -> GenerationRequest:
    """A prompt that shares no prefix with another salt's."""
    ids = [(salt * 31 + index * 7) % 250 for index in range(prompt_tokens)]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return GenerationRequest(prompt=ids, sampling=params, cache_salt=str(salt))


async def all_at_once(engine: Engine, number: int, prompt_tokens: int, tokens: int) -> None:
    await asyncio.gather(*(engine.generate(request(prompt_tokens, tokens, salt)) for salt in range(number)))


async def test_too_few_slots() -> None:
    async with engine(max_batch_sequences=2, kv_cache_memory=kv_memory(400)) as running:
        await all_at_once(running, 16, 8, 30)
        found = look(running)
    assert found.limit == "slots"
    [advice] = found.findings[0].advice
    assert advice.setting == "max_batch_sequences"
    assert advice.now == "2"
    assert 4 <= int(advice.to) <= 8
    assert "all 2 slots were taken while" in found.findings[0].evidence[0]


async def test_too_little_kv_memory() -> None:
    async with engine(max_batch_sequences=16, kv_cache_memory=kv_memory(26), prefix_caching=False) as running:
        await all_at_once(running, 16, 60, 60)
        found = look(running)
    assert found.limit == "kv"
    [advice] = found.findings[0].advice
    assert advice.setting == "kv_cache_memory"
    assert advice.now == kv_memory(26)
    assert advice.to.endswith("KiB")
    assert "lacked KV blocks" in found.findings[0].evidence[0]


async def test_too_small_a_token_budget() -> None:
    async with engine(max_batch_tokens=8, max_batch_sequences=8, kv_cache_memory=kv_memory(800)) as running:
        await all_at_once(running, 12, 300, 2)
        found = look(running)
    assert found.limit == "budget"
    [advice] = found.findings[0].advice
    assert (advice.setting, advice.now) == ("max_batch_tokens", "8")
    assert int(advice.to) >= 16


async def test_prompts_that_disturb_streams() -> None:
    settings = {"max_batch_tokens": 512, "max_batch_sequences": 16, "kv_cache_memory": kv_memory(2000)}
    async with engine(protect_streams=False, **settings) as running:

        async def prompts() -> None:
            for salt in range(100, 125):
                await running.generate(request(400, 1, salt))
                await asyncio.sleep(0.01)

        streams = [asyncio.create_task(running.generate(request(8, 400, salt))) for salt in range(4)]
        await prompts()
        found = look(running)
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    assert found.limit == "prefill"
    [advice] = found.findings[0].advice
    assert (advice.setting, advice.now, advice.to) == ("protect_streams", "off", "on")
    assert "streams stood still" in found.findings[0].evidence[1]


async def test_too_few_clients() -> None:
    async with engine(max_batch_sequences=8) as running:
        for salt in range(6):
            await running.generate(request(8, 6, salt))
            await asyncio.sleep(0.05)
        found = look(running)
    assert found.limit == "clients"
    assert found.findings[0].advice[0].setting == ""
    assert "of 8 slots were in use" in found.findings[0].evidence[0]


# --- made-up steps


def timeline(*steps: dict[str, Any], slots: int = 8, **settings: Any) -> dict[str, Any]:
    """Steps one after another; ``times`` repeats one, ``pause`` lets nothing be done after it."""
    known = {"max_batch_tokens": 512, "max_batch_sequences": slots, "kv_cache_memory": "0.4", "target_step_ms": 200.0,
             "protect_streams": True, "batching": "continuous", "max_queue_requests": 512, "policy": "fcfs",
             "max_model_len": 0, "prefix_caching": True, **settings}  # fmt: skip
    rows, now = [], 100.0
    plain = {"duration_s": 0.01, "num_sequences": 4, "num_decode_tokens": 4, "num_running": 4, "kv_cache_usage": 0.5}
    for given in steps:
        step = {**dict.fromkeys(COLUMNS, 0), "obstacle": "", **plain, **given}
        for _ in range(step.get("times", 1)):
            rows.append([now if name == "started" else step[name] for name in COLUMNS])
            now += step["duration_s"] + step.get("pause", 0.0)
    return {"settings": known, "slots": slots, "blocks": 100, "now": now, "columns": list(COLUMNS), "steps": rows}


def advice_of(found: Diagnosis) -> tuple[str, str, str]:
    advice = found.findings[0].advice[0]
    return advice.setting, advice.now, advice.to


SLOTS = {"times": 50, "num_sequences": 8, "num_waiting": 4, "obstacle": "slots"}


def test_more_slots_only_as_far_as_memory_goes() -> None:
    found = diagnose(Run(timeline(SLOTS)))
    assert advice_of(found) == ("max_batch_sequences", "8", "12")
    found = diagnose(Run(timeline({**SLOTS, "num_waiting": 40})))
    assert advice_of(found) == ("max_batch_sequences", "8", "15")  # 0.95 of the blocks
    found = diagnose(Run(timeline({**SLOTS, "kv_cache_usage": 0.97})))
    assert advice_of(found) == ("kv_cache_memory", "0.4", "0.60")


def test_memory_that_is_a_share_goes_no_further_than_there_is() -> None:
    short = {"times": 50, "num_sequences": 2, "num_waiting": 9, "obstacle": "blocks", "kv_cache_usage": 1.0}
    assert advice_of(diagnose(Run(timeline(short)))) == ("kv_cache_memory", "0.4", "0.95")
    assert advice_of(diagnose(Run(timeline(short, kv_cache_memory="0.95")))) == ("kv_cache_memory", "0.95", "0.95")
    assert advice_of(diagnose(Run(timeline(short, kv_cache_memory="1GiB")))) == ("kv_cache_memory", "1GiB", "4GiB")


def test_a_budget_of_time_and_one_of_tokens() -> None:
    short = {"times": 50, "num_prefill_tokens": 60, "num_left_tokens": 900}
    assert advice_of(diagnose(Run(timeline(short)))) == ("target_step_ms", "200", "300")
    full = {**short, "num_prefill_tokens": 508}
    assert advice_of(diagnose(Run(timeline(full)))) == ("max_batch_tokens", "512", "2048")


def test_what_to_do_for_streams_by_what_is_done_already() -> None:
    steps = ({"times": 20}, {"times": 20, "duration_s": 0.05, "num_prefill_tokens": 300})
    assert advice_of(diagnose(Run(timeline(*steps, protect_streams=False)))) == ("protect_streams", "off", "on")
    assert advice_of(diagnose(Run(timeline(*steps)))) == ("target_step_ms", "200", "20")
    assert advice_of(diagnose(Run(timeline(*steps, target_step_ms=20.0)))) == ("max_batch_tokens", "512", "256")


def test_what_decodes_take_alone_is_fitted_where_they_never_are() -> None:
    short = {"duration_s": 0.012, "num_prefill_tokens": 20}
    long = {"duration_s": 0.06, "num_prefill_tokens": 500}
    found = diagnose(Run(timeline(*[short, long] * 20)))
    assert found.limit == "prefill"
    assert "one without 12.0 ms: 3.0 x" in found.findings[0].evidence[0]
    assert diagnose(Run(timeline({**short, "times": 40}))).limit == "none"  # nothing to compare with


def test_static_batching_is_named() -> None:
    found = diagnose(Run(timeline({"times": 50, "num_waiting": 3, "obstacle": "group"}, batching="static")))
    assert found.limit == "group"
    assert advice_of(found) == ("batching", "static", "continuous")


def test_a_server_in_good_order_is_left_alone() -> None:
    found = diagnose(Run(timeline({"times": 100, "num_sequences": 7})))
    assert found.limit == "none"
    assert found.findings[0].advice == ()


def test_the_heaviest_limit_comes_first_and_only_what_is_worth_saying() -> None:
    kv = {"times": 30, "num_waiting": 4, "obstacle": "blocks"}
    slots = {**SLOTS, "times": 60}
    rare = {"times": 5, "num_left_tokens": 10}
    found = diagnose(Run(timeline(kv, slots, rare)))
    assert [finding.limit for finding in found.findings] == ["slots", "kv"]


def test_a_window_of_the_last_seconds() -> None:
    steps = (SLOTS, {"times": 50, "num_sequences": 1, "num_running": 0, "pause": 0.05})
    assert diagnose(Run(timeline(*steps), 2.9)).limit == "clients"
    assert diagnose(Run(timeline(*steps), 1e9)).findings[0].limit in ("slots", "clients")
    assert "which is too few" in diagnose(Run(timeline(SLOTS), 0.05)).findings[0].evidence[0]


@pytest.mark.parametrize("broken", [{}, {"settings": 1}, {"steps": [[1]]}, {"columns": []}, {"settings": {}}])
def test_what_is_no_timeline_is_refused(broken: dict[str, Any]) -> None:
    with pytest.raises(TimelineUnreadable):
        Run({**timeline(SLOTS), **broken} if broken else {})


# --- the command


def run(*argv: str) -> str:
    out = io.StringIO()
    assert doctor_command.main(argv, {}, out) == 0
    return out.getvalue()


def test_the_command_on_a_server_and_on_what_it_saved(tmp_path: Path) -> None:
    import httpx

    with serving(max_batch_sequences=8) as running:
        for index in range(5):
            body = {"text_input": f"hello {index}", "parameters": {"max_tokens": 8, "ignore_eos": True}}
            assert httpx.post(f"{running.url}/v2/models/tiny/generate", json=body, timeout=10).status_code == 200
        wait_until(lambda: running.engine.stats().live == 0)
        said = run(running.url, "--save", str(tmp_path / "run.json"), "--json", str(tmp_path / "found.json"))
        answer = httpx.get(f"{running.url}/timeline").json()
        assert set(answer["settings"]) == set(SETTINGS)
    assert "limit: clients" in said
    assert "=> more requests at once, or fewer replicas" in said
    assert run(str(tmp_path / "run.json")) == said
    assert json.loads((tmp_path / "found.json").read_text())["limit"] == "clients"


def test_the_command_called_wrongly(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="got 0 places"):
        run()
    with pytest.raises(SettingsError, match="--seconds"):
        run("x", "--seconds", "-1")
    with pytest.raises(TimelineUnreadable, match="No such file"):
        run(str(tmp_path / "none"))
    (tmp_path / "bad").write_text("[1]")
    with pytest.raises(TimelineUnreadable, match="no timeline"):
        run(str(tmp_path / "bad"))
    with pytest.raises(ServerSilent):
        run("http://127.0.0.1:9")
