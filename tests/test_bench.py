"""The bench: workloads, figures, runs in-process and over HTTP, the report."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from tests.standalone_fakes import Factory, FakeEngine

from carousel.bench import client, inprocess, report, scrape
from carousel.bench.command import bench_help, main
from carousel.bench.measure import BenchError, RequestResult, check, figures, median_figures, summary
from carousel.bench.workload import WorkItem, Workload, WorkloadError, built_in_workload, load_workload
from carousel.config import Settings, SettingsError
from carousel.engine.errors import QueueFull
from carousel.engine.request import FinishReason
from carousel.engine.timeline import EngineStats, RequestRecord, StepRecord
from carousel.telemetry.metrics import EngineMetrics

ENTRIES = [
    {"id": 7, "prompt_ids": [1, 2, 3], "prompt": "abc", "prompt_len": 3, "output_len": 4, "unit_gap": 0.5},
    {"id": 8, "prompt_ids": [4], "prompt": "d", "prompt_len": 1, "output_len": 2, "unit_gap": 1.5},
    {"id": 9, "prompt_ids": [5, 6], "prompt": "ef", "prompt_len": 2, "output_len": 6, "unit_gap": 1.0},
]


@pytest.fixture(autouse=True)
def logging_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("carousel.telemetry.logs.configure_logging", lambda level, style: None)  # it is for good


@pytest.fixture
def workload_file(tmp_path: Path) -> Path:
    path = tmp_path / "workload.json"
    path.write_text(json.dumps(ENTRIES))
    return path


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


class TestWorkload:
    def test_a_file_is_read_in_order(self, workload_file: Path) -> None:
        workload = load_workload(workload_file)
        assert [item.id for item in workload.items] == ["7", "8", "9"]
        assert workload.items[0] == WorkItem("7", "abc", (1, 2, 3), 4, 0.5)
        assert workload.describe()["prompt_tokens"] == 6
        assert workload.describe()["output_tokens"] == 12
        assert len(load_workload(workload_file, limit=2).items) == 2

    def test_arrivals(self, workload_file: Path) -> None:
        workload = load_workload(workload_file)
        assert workload.arrivals(math.inf) == [0, 0, 0]
        assert workload.arrivals(2.0) == [0.25, 1.0, 1.5]

    @pytest.mark.parametrize(
        ("change", "field"),
        [
            ({"prompt_ids": [1, -2, 3]}, "prompt_ids"),
            ({"prompt_ids": [1, True, 3]}, "prompt_ids"),
            ({"prompt_ids": "abc"}, "prompt_ids"),
            ({"prompt_ids": [], "prompt": ""}, "prompt"),
            ({"prompt": 3}, "prompt"),
            ({"output_len": 0}, "output_len"),
            ({"output_len": 2.5}, "output_len"),
            ({"output_len": None}, "output_len"),
            ({"unit_gap": -1}, "unit_gap"),
            ({"unit_gap": "1"}, "unit_gap"),
            ({"prompt_len": 4}, "prompt_len"),
        ],
    )
    def test_a_wrong_entry_is_named(self, change: dict[str, Any], field: str, workload_file: Path) -> None:
        workload_file.write_text(
            json.dumps([ENTRIES[0], ENTRIES[1] | {"prompt_ids": [1, 2, 3], "prompt_len": 3} | change])
        )
        with pytest.raises(WorkloadError, match=rf"workload\.json: request 1: {field} must"):
            load_workload(workload_file)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "not JSON"),
            ("[]", "non-empty list"),
            ("{}", "non-empty list"),
            ("[3]", "request 0: must be an object"),
        ],
    )
    def test_a_wrong_file_is_named(self, content: str, message: str, workload_file: Path) -> None:
        workload_file.write_text(content)
        with pytest.raises(WorkloadError, match=message):
            load_workload(workload_file)

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(WorkloadError, match="No such file"):
            load_workload(tmp_path / "none.json")

    def test_the_built_in_one_is_the_same_for_a_seed_and_another_for_another(self) -> None:
        first = built_in_workload(3, 20, words)
        assert first == built_in_workload(3, 20, words)
        assert first.digest != built_in_workload(4, 20, words).digest
        assert len(built_in_workload().items) == 32

    @given(st.integers(0, 1000))
    def test_the_built_in_one_has_lengths_within_its_bounds(self, seed: int) -> None:
        for item in built_in_workload(seed, 4, words).items:
            assert 16 <= len(item.prompt_ids) <= 512
            assert 8 <= item.output_len <= 192
            assert item.unit_gap > 0

    def test_without_a_tokenizer_the_built_in_one_is_text_of_the_same_requests(self) -> None:
        plain, encoded = built_in_workload(1, 8), built_in_workload(1, 8, words)
        assert all(item.prompt and not item.prompt_ids for item in plain.items)
        assert plain.items[0].output_len == encoded.items[0].output_len


class TestFigures:
    @given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
    def test_summaries_are_numpys(self, values: list[float]) -> None:
        result = summary(values)
        assert result["mean"] == pytest.approx(numpy.mean(values))
        for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
            assert result[name] == pytest.approx(numpy.percentile(values, share))

    def test_of_nothing_nothing_is_known(self) -> None:
        assert summary([]) == {"mean": None, "p50": None, "p90": None, "p99": None}

    def test_a_request_by_hand(self) -> None:
        result = RequestResult("a", 1.0, 5, deltas=[(1.5, 1), (1.7, 2), (2.5, 2)], output_tokens=5)
        assert result.ttft == 0.5
        assert result.e2e == 1.5
        assert result.tpot == pytest.approx(0.25)
        assert list(result.gaps()) == pytest.approx([0.2, 0.0, 0.8, 0.0])

    def test_a_run_by_hand(self) -> None:
        results = [
            RequestResult("a", 0.0, 3, [(1.0, 1), (2.0, 1), (3.0, 1)], 10, 3, 3.0, 0.5),
            RequestResult("b", 1.0, 1, [(4.0, 1)], 20, 1, 4.0, 1.5),
        ]
        found = figures(results, 4.0, None)
        assert found["output_tokens_per_second"] == 1.0
        assert found["total_tokens_per_second"] == 8.5
        assert found["requests_per_second"] == 0.5
        assert found["ttft"]["mean"] == 2.0
        assert found["tpot"]["mean"] == 1.0  # one token has no time between tokens
        assert found["queue"]["mean"] == 1.0
        assert found["e2e"]["p50"] == 3.0
        assert found["batch_occupancy"]["mean"] is None

    def test_wrong_lengths_and_errors_are_refused_by_name(self) -> None:
        good = RequestResult("a", 0, 2, [(1, 2)], output_tokens=2)
        check([good])
        short = RequestResult("b", 0, 2, [(1, 1)], output_tokens=1)
        failed = RequestResult("c", 0, 2, error="HTTP 500")
        with pytest.raises(BenchError, match=r"2 of 3 .* b: 1 output tokens instead of 2; request c: HTTP 500"):
            check([good, short, failed])
        with pytest.raises(BenchError, match=r"and 4 more"):
            check([short] * 9)

    def test_medians_are_taken_figure_by_figure(self) -> None:
        runs = [{"wall": wall, "ttft": {"mean": wall * 2, "p99": None}, "source": "engine"} for wall in (3.0, 1.0, 2.0)]
        assert median_figures(runs) == {"wall": 2.0, "ttft": {"mean": 4.0, "p99": None}, "source": "engine"}
        assert median_figures(runs[:1]) == runs[0]


class TestInProcess:
    async def run(self, engine: FakeEngine, workload: Workload, **options: Any) -> dict[str, Any]:
        return await inprocess.run(engine, workload, **{"rate": math.inf, **options})

    async def test_all_at_once(self, workload_file: Path) -> None:
        engine, seen = FakeEngine(Settings()), {"tokens": 0, "requests": 0}
        progress = inprocess.Progress(
            lambda count: seen.update(tokens=seen["tokens"] + count),
            lambda: seen.update(requests=seen["requests"] + 1),
        )
        found = await self.run(engine, load_workload(workload_file), progress=progress)
        assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (3, 6, 12)
        assert found["output_tokens_per_second"] == pytest.approx(12 / found["wall"])
        assert found["queue"] == {"mean": 0.25, "p50": 0.25, "p90": 0.25, "p99": 0.25}
        assert found["queue_source"] == "engine"
        assert found["steps"] == 12
        assert 1 < found["batch_occupancy"]["mean"] <= 3
        assert found["mean_tokens_per_step"] == (12 + 6) / 12
        assert 0 < found["ttft"]["p50"] <= found["e2e"]["p50"] <= found["wall"]
        assert seen == {"tokens": 12, "requests": 3}
        assert engine.timeline.observers == []

    async def test_requests_are_greedy_exact_and_by_token_ids(self, workload_file: Path) -> None:
        engine = FakeEngine(Settings())
        await self.run(engine, load_workload(workload_file))
        request = engine.requests[0]
        assert request.prompt == [1, 2, 3]
        assert (request.sampling.temperature, request.sampling.max_tokens) == (0, 4)
        assert request.sampling.ignore_eos

    async def test_arrivals_are_spread(self, workload_file: Path) -> None:
        engine = FakeEngine(Settings())
        found = await self.run(engine, load_workload(workload_file), rate=50.0)
        arrivals = [request.arrival for request in engine.requests]
        assert arrivals[2] - arrivals[0] >= 0.04
        assert found["wall"] >= 0.06

    async def test_concurrency_is_bounded_and_its_wait_is_not_counted(self) -> None:
        engine = FakeEngine(Settings())
        engine.step_s = 0.01
        workload = Workload("w", tuple(WorkItem(str(i), "", (1,), 3, 0.0) for i in range(6)))
        found = await self.run(engine, workload, concurrency=2)
        assert engine.peak == 2
        assert found["wall"] > 0.085
        assert found["ttft"]["p99"] < found["wall"] / 2

    async def test_missing_tokens_are_an_error(self, workload_file: Path) -> None:
        engine = FakeEngine(Settings())
        engine.short_by = 1
        with pytest.raises(BenchError, match=r"3 of 3 .* request 7: 3 output tokens instead of 4"):
            await self.run(engine, load_workload(workload_file))

    async def test_failures_and_refusals_are_errors(self, workload_file: Path) -> None:
        engine = FakeEngine(Settings())
        engine.fail = "out of luck"
        with pytest.raises(BenchError, match="ended by error: out of luck"):
            await self.run(engine, load_workload(workload_file))
        engine.fail, engine.refuse = None, QueueFull("the queue is full", 1.0)
        with pytest.raises(BenchError, match="QueueFull: the queue is full"):
            await self.run(engine, load_workload(workload_file))
        assert engine.timeline.observers == []

    async def test_warm_up_is_short(self, workload_file: Path) -> None:
        engine = FakeEngine(Settings())
        await inprocess.warm_up(engine, built_in_workload(0, 5, words), 2)
        assert [request.sampling.max_tokens for request in engine.requests] == [8, 8]


class FakeServer:
    """OpenAI's streaming completions, a model list and the real metrics, on loopback in a thread of its own."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.with_ids = True
        self.with_metrics = True
        self.break_off = False
        self.status = 200
        self.short_by = 0
        self.root = "/openai/v1"
        self.metrics = EngineMetrics("fake", EngineStats)
        self.registry = CollectorRegistry()
        self.metrics.register(self.registry)
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._kserve_models)
        app.router.add_get("/openai/v1/models", self._models)
        app.router.add_post("/{root:.*v1}/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    async def _models(self, request: web.Request) -> web.Response:
        if self.root != "/openai/v1":
            raise web.HTTPNotFound
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    async def _kserve_models(self, request: web.Request) -> web.Response:
        return web.json_response({"models": ["plain"]})

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.with_metrics:
            raise web.HTTPNotFound
        return web.Response(body=generate_latest(self.registry))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body | {"path": request.path})
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"] - self.short_by
        for place in range(0, count, 2):
            ids = list(range(place, min(place + 2, count)))
            choice: dict[str, Any] = {"index": 0, "text": "".join(f"w{i} " for i in ids), "finish_reason": None}
            if self.with_ids:
                choice["token_ids"] = ids
            await self._send(response, {"choices": [choice]})
            await asyncio.sleep(0.002)
        if self.break_off:
            return response
        await self._send(response, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        await self._send(response, {"choices": [], "usage": usage})
        self._observe()
        await response.write(b"data: [DONE]\n\n")
        return response

    def _observe(self) -> None:
        self.metrics.on_step(StepRecord(0, 0, 0.01, 0, 0, 0, 4, 6, 2, 0, 2, 0, 4, 0), [0.01])
        self.metrics.on_finish(RequestRecord("r", "", FinishReason.LENGTH, 1, 1, 0, 1, 0, 2.0, queue_s=0.4))

    async def _send(self, response: web.StreamResponse, event: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    server.start()
    yield server
    server.stop()


class TestClient:
    async def run(self, server: FakeServer, workload: Workload, model: str | None = None) -> dict[str, Any]:
        async with client.Client(server.url, model) as under_test:
            return await client.run(under_test, workload, rate=math.inf)

    async def test_a_run(self, server: FakeServer, workload_file: Path) -> None:
        server._observe()  # what happened before the run must not count
        found = await self.run(server, load_workload(workload_file))
        assert (found["requests"], found["prompt_tokens"], found["output_tokens"]) == (3, 6, 12)
        assert found["queue_source"] == "metrics"
        assert found["queue"]["mean"] == pytest.approx(0.4)
        assert 0.3 <= found["queue"]["p50"] <= 0.5
        assert found["batch_occupancy"]["mean"] == 4
        assert found["mean_tokens_per_step"] == 8
        assert 0 < found["ttft"]["mean"] <= found["e2e"]["mean"]
        body = server.bodies[0]
        assert body["path"] == "/openai/v1/completions"
        assert body["model"] == "first"
        assert body["prompt"] == [1, 2, 3]
        assert (body["max_tokens"], body["temperature"], body["ignore_eos"], body["stream"]) == (4, 0, True, True)

    async def test_tokens_per_chunk_come_from_their_ids_or_count_as_one(
        self, server: FakeServer, workload_file: Path
    ) -> None:
        workload = load_workload(workload_file, limit=1)
        counts = []
        for server.with_ids in (True, False):
            async with client.Client(server.url) as under_test:
                result = RequestResult("x", 0, 4)
                await under_test.complete(workload.items[0], result, 0.0, inprocess.Progress())
                counts.append([count for _, count in result.deltas])
                assert result.output_tokens == 4
        assert counts == [[2, 2], [1, 1]]

    async def test_the_model_and_the_root_may_be_given_or_found(self, server: FakeServer, workload_file: Path) -> None:
        workload = load_workload(workload_file, limit=1)
        await self.run(server, workload, "second")
        server.root = "none"
        await self.run(server, workload)
        async with client.Client(server.url + "/v1/") as under_test:
            await client.warm_up(under_test, workload, 1)
        assert [(body["model"], body["path"]) for body in server.bodies] == [
            ("second", "/openai/v1/completions"),
            ("plain", "/v1/completions"),
            ("plain", "/v1/completions"),
        ]

    async def test_without_metrics_queue_and_occupancy_are_unknown(
        self, server: FakeServer, workload_file: Path
    ) -> None:
        server.with_metrics = False
        found = await self.run(server, load_workload(workload_file))
        assert found["queue_source"] is None
        assert found["queue"]["mean"] is None
        assert found["batch_occupancy"]["mean"] is None

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"status": 429}, "HTTP 429: .*no"),
            ({"break_off": True}, r"broke off before \[DONE\]"),
            ({"short_by": 1}, "output tokens instead of"),
        ],
    )
    async def test_what_goes_wrong_is_an_error(
        self, change: dict[str, Any], message: str, server: FakeServer, workload_file: Path
    ) -> None:
        vars(server).update(change)
        workload = load_workload(workload_file)
        with pytest.raises(BenchError, match=message):
            await self.run(server, workload)
        async with client.Client(server.url) as under_test:
            with pytest.raises(BenchError, match=message):
                await client.warm_up(under_test, workload, 1)

    async def test_nobody_there(self) -> None:
        with pytest.raises(BenchError, match=r"no OpenAI API with a model at http://127.0.0.1:9 .*/openai/v1/models"):
            async with client.Client("http://127.0.0.1:9"):
                pass


class TestScrape:
    def test_quantiles_are_those_of_the_run_alone(self) -> None:
        head = "# TYPE carousel_request_queue_time_seconds histogram\n"

        def text(low: int, middle: int, all_: int, total: float) -> str:
            name = "carousel_request_queue_time_seconds"
            bounds = (
                f'{name}_bucket{{le="1"}} {low}\n{name}_bucket{{le="2"}} {middle}\n{name}_bucket{{le="+Inf"}} {all_}\n'
            )
            return f"{head}{bounds}{name}_count {all_}\n{name}_sum {total}\n"

        found = scrape.queue_summary(scrape.parse(text(5, 5, 5, 1.0)), scrape.parse(text(5, 14, 15, 17.0)))
        assert found is not None
        assert found["mean"] == 1.6
        assert found["p50"] == pytest.approx(1 + 5 / 9)
        assert found["p90"] == 2.0
        assert found["p99"] == 2.0  # beyond the last bound nothing more is known

    def test_without_the_histogram_nothing_is_known(self) -> None:
        empty = scrape.parse("other_metric 3\n")
        assert scrape.queue_summary(empty, empty) is None
        assert scrape.occupancy(empty, empty) is None


class TestCommand:
    def test_in_process_with_json(
        self, workload_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        factory, target = Factory(), tmp_path / "deep" / "report.json"
        argv = ["--workload", str(workload_file), "--json", str(target), "--max-batch-sequences", "8"]
        assert main(argv, {}, factory) == 0
        written = json.loads(target.read_text())
        assert written["output_tokens_per_second"] > 0
        for name in ("ttft", "tpot", "itl", "queue", "e2e"):
            assert set(written[name]) == {"mean", "p50", "p90", "p99"}
            assert all(isinstance(value, float) for value in written[name].values())
        assert written["settings"]["max_batch_sequences"] == 8
        assert written["settings"]["prefix_caching"] is False
        assert written["machine"]["cpus"] >= 1
        assert written["rate"] == "inf"
        assert written["workload"]["requests"] == 3
        assert "runs" not in written
        shown = capsys.readouterr().out
        assert "3 requests of workload.json" in shown
        assert "| time to first token" in shown
        assert "output tokens/s" in shown
        assert [engine.stopped for engine in factory.engines] == [True]
        assert len(factory.engines[0].requests) == 2 + 3  # the warm-up and the run

    def test_a_profile_shows_where_the_time_goes(self, workload_file: Path, tmp_path: Path, capsys: Any) -> None:
        factory, target = Factory(), tmp_path / "report.json"
        assert main(["--workload", str(workload_file), "--profile", "--json", str(target)], {}, factory) == 0
        profile = json.loads(target.read_text())["profile"]
        steps = [step for step in factory.engines[0].timeline.steps if step.num_sequences]
        assert 0 < profile["steps"] < len(steps)  # the warm-up does not count
        assert profile["parts"].keys() >= {"matrix products", "attention", "sampling", "scheduling", "forward, other"}
        assert sum(part["share"] for part in profile["parts"].values()) == pytest.approx(1.0)
        assert "matrix products" in capsys.readouterr().out

    def test_the_garbage_collector_looks_at_no_more_than_in_a_server(
        self, workload_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[int] = []
        run = inprocess.run

        async def noted(*arguments: Any, **options: Any) -> Any:
            seen.append(gc.get_freeze_count())
            return await run(*arguments, **options)

        monkeypatch.setattr(inprocess, "run", noted)
        assert main(["--workload", str(workload_file)], {}, Factory()) == 0
        assert seen[0] > 10_000
        assert gc.get_freeze_count() == 0

    def test_nothing_is_refused_for_a_full_queue_unless_asked(self, workload_file: Path) -> None:
        factory = Factory()
        main(["--workload", str(workload_file)], {}, factory)
        main(["--workload", str(workload_file), "--max-queue-requests", "5"], {}, factory)
        assert factory.engines[0].settings.max_queue_requests > 10**6
        assert factory.engines[0].settings.max_queue_tokens > 10**9
        assert factory.engines[1].settings.max_queue_requests == 5

    def test_settings_come_from_the_environment_too_and_prefix_caching_may_be_on(self, workload_file: Path) -> None:
        factory = Factory()
        main(["--workload", str(workload_file), "--prefix-caching"], {"CAROUSEL_MAX_BATCH_TOKENS": "99"}, factory)
        assert factory.engines[0].settings.prefix_caching is True
        assert factory.engines[0].settings.max_batch_tokens == 99

    def test_repeated_runs_use_one_engine_and_report_all(self, workload_file: Path, tmp_path: Path) -> None:
        factory, target = Factory(), tmp_path / "r.json"
        main(["--workload", str(workload_file), "--repeat=3", "--json", str(target), "--warmup=0"], {}, factory)
        written = json.loads(target.read_text())
        walls = sorted(run["wall"] for run in written["runs"])
        assert written["wall"] == walls[1]
        assert len(factory.engines) == 1
        assert len(factory.engines[0].requests) == 9

    def test_modes_are_compared_alternating_on_one_model(
        self, workload_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def prepare(engine: FakeEngine) -> None:
            engine.step_s = 0.02 if engine.settings.batching == "static" else 0.005

        factory, target = Factory(prepare), tmp_path / "c.json"
        argv = ["--workload", str(workload_file), "--compare", "static,continuous", "--repeat", "2"]
        assert main([*argv, "--json", str(target)], {}, factory) == 0
        assert factory.loads == 1
        assert [engine.settings.batching for engine in factory.engines] == ["static", "continuous"] * 2
        written = json.loads(target.read_text())
        assert list(written["compare"]) == ["static", "continuous"]
        assert written["batching"] == "continuous"
        assert written["compare"]["static"]["settings"]["batching"] == "static"
        assert len(written["compare"]["static"]["runs"]) == 2
        rates = [written["compare"][mode]["output_tokens_per_second"] for mode in ("static", "continuous")]
        assert written["gains"]["output_tokens_per_second"] == pytest.approx(rates[1] / rates[0])
        assert written["gains"]["output_tokens_per_second"] > 1.2
        assert written["gains"]["ttft.mean"] > 1.2  # shorter is better
        assert written["gains"]["queue.mean"] == 1.0
        table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        assert "static" in table[0]
        assert table[0].index("static") < table[0].index("continuous") < table[0].index("gain")
        assert any(line.startswith("| queue time, mean") and "1 x" in line for line in table)

    def test_the_built_in_workload_needs_no_file(self, tmp_path: Path) -> None:
        target = tmp_path / "b.json"
        argv = ["--requests=3", "--workload-seed=5", "--json", str(target)]
        assert main(argv, {}, Factory(lambda engine: setattr(engine, "step_s", 0.0))) == 0
        described = json.loads(target.read_text())["workload"]
        assert described == built_in_workload(5, 3, words).describe()

    def test_json_on_standard_output_is_alone_there(
        self, workload_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--workload", str(workload_file), "--json", "-"], {}, Factory()) == 0
        out, err = capsys.readouterr()
        assert json.loads(out)["requests"] == 3
        assert "time to first token" in err

    def test_against_a_url(
        self, server: FakeServer, workload_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        factory, target = Factory(), tmp_path / "u.json"
        argv = ["--url", server.url, "--workload", str(workload_file), "--json", str(target), "--repeat=2"]
        assert main([*argv, "--model_name", "second"], {}, factory) == 0
        written = json.loads(target.read_text())
        assert written["target"] == server.url
        assert written["model"] == "second"
        assert written["queue_source"] == "metrics"
        assert factory.loads == 0
        assert "from the server's /metrics" in capsys.readouterr().out

    def test_unavailable_figures_are_said_to_be(
        self, server: FakeServer, workload_file: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        server.with_metrics = False
        assert main(["--url", server.url, "--workload", str(workload_file)], {}, Factory()) == 0
        shown = capsys.readouterr().out
        assert "queue time: unavailable" in shown
        assert "batch occupancy: unavailable" in shown

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            ("--url ftp://x", "--url: got 'ftp://x'"),
            ("--url http://x --batching static", "--batching: has no effect with --url"),
            ("--url http://x --compare static,continuous", "--compare runs in this process"),
            ("--compare static,continuous --batching static", "--batching and --compare both"),
            ("--profile --url http://x", "--profile looks at one engine"),
            ("--compare static", "--compare: got 'static'"),
            ("--compare static,other", "--compare: got 'static,other'"),
            ("--rate 0", "--rate: got '0'"),
            ("--rate nan", "--rate: got 'nan'"),
            ("--repeat 0", "--repeat: got '0'"),
            ("file.json", "--workload file.json"),
            ("--max-batch-tokens 0", "--max-batch-tokens / CAROUSEL_MAX_BATCH_TOKENS"),
        ],
    )
    def test_wrong_flags_are_refused_before_anything_is_loaded(self, argv: str, message: str) -> None:
        factory = Factory()
        with pytest.raises(SettingsError) as refused:
            main(argv.split(), {}, factory)
        assert message in str(refused.value)
        assert factory.loads == 0

    def test_a_bad_workload_is_refused_before_anything_is_loaded(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        factory = Factory()
        assert main(["--workload", str(tmp_path / "none")], {}, factory) == 1
        assert "No such file" in capsys.readouterr().err
        assert factory.loads == 0

    def test_a_rate_needs_gaps(self, workload_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        workload_file.write_text(json.dumps([{"prompt": "a", "output_len": 1}]))
        assert main(["--workload", str(workload_file), "--rate", "2"], {}, Factory()) == 1
        assert "has no unit_gap" in capsys.readouterr().err

    def test_a_failed_run_writes_no_report_and_stops_the_engine(
        self, workload_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = tmp_path / "r.json"
        factory = Factory(lambda engine: setattr(engine, "short_by", 1))
        assert main(["--workload", str(workload_file), "--warmup=0", "--json", str(target)], {}, factory) == 1
        assert "output tokens instead of" in capsys.readouterr().err
        assert not target.exists()
        assert factory.engines[0].stopped

    def test_a_report_that_cannot_be_written_is_an_error(
        self, workload_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["--workload", str(workload_file), "--json", str(tmp_path)], {}, Factory()) == 1
        assert f"--json {tmp_path}" in capsys.readouterr().err

    def test_help_shows_bench_flags_and_settings(self) -> None:
        text = bench_help()
        assert "--compare MODE,MODE" in text
        assert "--max-batch-tokens N" in text


class TestReport:
    @pytest.mark.parametrize(
        ("value", "text"),
        [(None, "–"), (0.0, "0.0 ms"), (0.0123, "12.3 ms"), (0.9999, "1.00 s"), (1.5, "1.50 s"), (123.4, "123 s")],
    )
    def test_times_are_shown_with_their_unit(self, value: float | None, text: str) -> None:
        assert report.seconds(value) == text

    def test_the_progress_bar_counts_on_a_terminal_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        shown = {}
        for stream in (Terminal(), io.StringIO()):
            monkeypatch.setattr("sys.stderr", stream)
            with report.progress_bar("static 1/2", 3, shown=True) as progress:
                progress.on_tokens(1200)
                progress.on_request()
            shown[type(stream)] = stream.getvalue()
        assert shown[io.StringIO] == ""
        for text in ("static 1/2", "1/3", "1,200 tokens"):
            assert text in shown[Terminal]

    def test_gains_that_cannot_be_said_are_none(self) -> None:
        base: dict[str, Any] = figures([RequestResult("a", 0, 1, [(1, 1)], 1, 1)], 1.0, None)
        found = report.gains({"static": base, "continuous": base})
        assert found["queue.mean"] is None
        assert found["wall"] == 1.0
