"""Ties everything to locust's events: options, shares of workers, statistics that merge, reports and the exit code."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import gevent
import requests
from grpc.experimental.gevent import init_gevent
from locust import events, runners
from locust.runners import MasterRunner, WorkerRunner

from carousel.bench import scrape
from carousel.bench.slo import TOTAL
from carousel.bench.workload import WorkloadError
from loadtest import report, slo, web
from loadtest.arrivals import ArrivalError
from loadtest.figures import Board, Row
from loadtest.history import History
from loadtest.options import add_options, authorization, problems, slos_of
from loadtest.protocols import Target
from loadtest.shapes import TrafficShape
from loadtest.traffic import Traffic
from loadtest.users import SESSION

logger = logging.getLogger("loadtest")

SLO_MISSED = 3
UNUSABLE = 2
_SHARE, _DONE = "loadtest_share", "loadtest_done"
_KEY = "loadtest"
_HTTP_SECONDS = 10


class Unusable(Exception):
    """The test cannot be run; the message says why."""


class Plugin:
    """One process's part: alone, as the master, or as a worker."""

    def __init__(self, environment: Any) -> None:
        self.environment, self.options = environment, environment.parsed_options
        self.runner = environment.runner
        self.board = Board()
        self.share, self.run, self.workers = (0, 1), 0, 1
        self.model = ""
        self.running = self.failed = False
        self.waited_for: set[str] = set()
        self.before: scrape.Scrape | None = None
        self.queue: dict[str, float | None] | None = None
        self.started_at = time.time()
        self.began = time.process_time(), time.monotonic()
        self.cpu: dict[str, float] = {}

    def cpu_share(self) -> float:
        """The share of a CPU that this process has taken since the test began; at 1 it is the bottleneck."""
        cpu_s, wall_s = time.process_time() - self.began[0], time.monotonic() - self.began[1]
        return cpu_s / wall_s if wall_s else 0.0

    def look(self) -> tuple[Row | None, float | None]:
        """The row of all requests, and the seconds since the test began; None for what there is not."""
        running = self.running and not self.failed
        return self.board.rows().get(TOTAL), time.monotonic() - self.began[1] if running else None

    @property
    def is_worker(self) -> bool:
        return isinstance(self.runner, WorkerRunner)

    @property
    def is_master(self) -> bool:
        return isinstance(self.runner, MasterRunner)

    # --- a test's beginning and end

    def on_test_start(self, **_: Any) -> None:
        self.options = self.environment.parsed_options  # a worker has the master's by now
        if not self.is_worker:
            self.run += 1
            self.started_at = time.time()
        self.board.clear()
        self.began = time.process_time(), time.monotonic()
        self.cpu.clear()
        self.failed = False
        try:
            if not self.is_worker:
                if found := problems(self.options):  # locust's web page may have changed them
                    raise Unusable("; ".join(found))
                self.model = self.options.model or self._find_model()
                self.before = self._scrape()
            if self.is_master:
                self._share_out()
            else:
                traffic = Traffic(self.options, self.board, self.share)
                SESSION.reset(traffic, Target(self.model, self.options.openai_path, not self.options.plain))
        except (Unusable, WorkloadError, ArrivalError, OSError) as error:
            self._fail(str(error))
        self.running = True
        if self.is_worker:
            gevent.spawn(self._tell_when_done, SESSION.traffic, self.run)

    def _fail(self, why: str) -> None:
        """End a test that cannot be run."""
        logger.error("loadtest: %s", why)
        self.failed = True
        self.environment.process_exit_code = UNUSABLE
        SESSION.reset(None, None)
        if self.is_worker:
            self.runner.send_message(_DONE, {"run": self.run, "error": why})

    def _get(self, path: str) -> requests.Response:
        host = (self.environment.host or "").rstrip("/")
        return requests.get(host + path, headers=authorization(self.options), timeout=_HTTP_SECONDS)

    def _find_model(self) -> str:
        host, path = self.environment.host or "", self.options.openai_path
        if not host:
            raise Unusable("--host is missing: the server's address, such as http://127.0.0.1:8080")
        try:
            answer = self._get(f"{path}/models")
            listed = answer.json()
            names = [entry["id"] for entry in listed.get("data") or []] + list(listed.get("models") or [])
            if not names:
                raise ValueError(f"HTTP {answer.status_code} without a model")
        except (requests.RequestException, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unusable(f"{host}{path}/models names no model ({error}): say --model, or --openai-path") from None
        return str(names[0])

    def _scrape(self) -> scrape.Scrape | None:
        """What the server's ``/metrics`` says, or None where there is no such page."""
        try:
            answer = self._get("/metrics")
            return scrape.parse(answer.text) if answer.status_code == 200 else None
        except (requests.RequestException, ValueError):
            return None

    def _share_out(self) -> None:
        """Tell each worker which part of the arrivals is its own. Messages to a worker arrive in order, so that it
        knows before it is told to spawn users."""
        clients = self.runner.clients
        workers = [*clients.ready, *clients.spawning, *clients.running]
        self.waited_for, self.workers = {worker.id for worker in workers}, len(workers)
        for index, worker in enumerate(workers):
            share = {"index": index, "of": len(workers), "run": self.run, "model": self.model}
            self.runner.send_message(_SHARE, share, worker.id)

    def on_share(self, msg: Any, **_: Any) -> None:
        """A worker learns its part."""
        self.share, self.run, self.model = (msg.data["index"], msg.data["of"]), msg.data["run"], msg.data["model"]

    def _tell_when_done(self, traffic: Traffic | None, run: int) -> None:
        while traffic is not None and SESSION.traffic is traffic:
            if traffic.done:
                # With its last state: a master that quits soon after might not wait for another report.
                self.runner.send_message(_DONE, {"run": run, "error": None, **self._state()})
                return
            gevent.sleep(0.1)

    def on_done(self, msg: Any, **_: Any) -> None:
        """The master hears that a worker has nothing left."""
        if msg.data["run"] != self.run:
            return
        self.waited_for.discard(msg.node_id)
        if msg.data["error"]:
            self._fail(f"worker {msg.node_id}: {msg.data['error']}")
        else:
            self._take(msg.node_id, msg.data)

    def _state(self) -> dict[str, Any]:
        """What a worker tells of itself."""
        return {"rows": self.board.to_wire(), "cpu": self.cpu_share()}

    def _take(self, who: str, told: dict[str, Any]) -> None:
        self.board.take(who, told["rows"])
        self.cpu[who] = told["cpu"]

    def done(self) -> bool:
        """For the shape: whether the test is over."""
        if not self.running:
            return False
        if self.failed:
            return True
        if self.is_master:
            alive = {client.id for client in self.runner.clients.all}
            return not self.waited_for & alive
        return SESSION.traffic is not None and SESSION.traffic.done

    def on_test_stopping(self, **_: Any) -> None:
        SESSION.abandon()
        self.running = False

    def on_test_stop(self, **_: Any) -> None:
        SESSION.reset(None, None)
        if not self.is_master:
            self.cpu["own"] = self.cpu_share()
        if not self.is_worker and self.before is not None:
            after = self._scrape()
            self.queue = scrape.queue_summary(self.before, after) if after is not None else None

    # --- statistics of workers

    def on_report_to_master(self, data: dict[str, Any], **_: Any) -> None:
        data[_KEY] = {"run": self.run, **self._state()}

    def on_worker_report(self, client_id: str, data: dict[str, Any], **_: Any) -> None:
        told = data.get(_KEY)
        if told and told["run"] == self.run:
            self._take(client_id, told)

    def on_reset_stats(self, **_: Any) -> None:
        self.board.clear()

    # --- the end

    def test(self) -> dict[str, Any]:
        """For the JSON: what was run."""
        options = vars(self.options)
        names = (
            "protocol",
            "workload",
            "requests",
            "workload_seed",
            "shape",
            "rate",
            "peak",
            "duration",
            "concurrency",
        )
        source = "metrics" if self.queue else None
        return {
            "started_at": self.started_at,
            "host": self.environment.host,
            "model": self.model,
            **{name: options[name] for name in names},
            "workers": self.workers,
            "generator_cpu": max(self.cpu.values(), default=None),
            "server_queue": self.queue,
            "server_queue_source": source,
        }

    def on_quitting(self, **_: Any) -> None:
        if self.is_worker:
            return
        rows = self.board.rows()
        if not self.options.json:  # locust's --json wants standard output for itself
            print(report.table(rows), flush=True)
            if self.queue and self.queue["mean"] is not None:
                # Its percentiles are as coarse as the server's buckets: they stand in the JSON.
                print(f"mean queue time by the server's /metrics: {self.queue['mean'] * 1000:.1f} ms", flush=True)
            if self.cpu:
                print(f"the busiest load generator took {max(self.cpu.values()):.2f} of a CPU", flush=True)
        try:
            if self.options.csv_prefix:
                report.write(f"{self.options.csv_prefix}_tokens.csv", report.to_csv(rows))
            if self.options.tokens_json:
                report.write(self.options.tokens_json, report.to_json(rows, self.test()))
            self._judge(rows)
        except OSError as error:
            print(f"loadtest: {error}", file=sys.stderr)
            self.environment.process_exit_code = UNUSABLE

    def _judge(self, rows: dict[str, Any]) -> None:
        verdicts = slo.judge(slos_of(self.options), rows)
        for verdict in verdicts:
            print(f"SLO {verdict.line()}", file=sys.stderr, flush=True)
        if self.options.junit:
            wall = rows["all"].wall if "all" in rows else 0.0
            slo.write_junit(self.options.junit, verdicts, wall)
        if not verdicts or self.failed:
            return
        if not all(verdict.met for verdict in verdicts):
            self.environment.process_exit_code = SLO_MISSED
        elif any(verdict.slo.name == "errors" for verdict in verdicts):
            self.environment.process_exit_code = 0  # failures are within what --slo allows


def _on_init(environment: Any, runner: Any, web_ui: Any, **_: Any) -> None:
    options = environment.parsed_options
    plugin = Plugin(environment)
    worker = isinstance(runner, WorkerRunner)
    if not worker:
        if found := problems(options):
            print("\n".join(f"loadtest: {problem}" for problem in found), file=sys.stderr)
            sys.exit(UNUSABLE)
        environment.shape_class = TrafficShape(options, plugin.done)
        environment.shape_class.runner = runner
    init_gevent()  # gRPC's calls wait as greenlets; before the first channel
    if worker:
        runner.register_message(_SHARE, plugin.on_share)
        environment.events.report_to_master.add_listener(plugin.on_report_to_master)
    elif isinstance(runner, MasterRunner):
        runner.register_message(_DONE, plugin.on_done)
        environment.events.worker_report.add_listener(plugin.on_worker_report)
    if web_ui is not None:
        history = History(plugin.look)
        gevent.spawn(history.follow)
        web.add_tab(web_ui, plugin.board, history)
    hooks = environment.events
    hooks.test_start.add_listener(plugin.on_test_start)
    hooks.test_stopping.add_listener(plugin.on_test_stopping)
    hooks.test_stop.add_listener(plugin.on_test_stop)
    hooks.reset_stats.add_listener(plugin.on_reset_stats)
    hooks.quitting.add_listener(plugin.on_quitting)


def install() -> None:
    """Listen to locust; once, when the locustfile is loaded."""
    runners.WORKER_REPORT_INTERVAL = 1.0  # the tab shall move
    events.init_command_line_parser.add_listener(add_options)
    events.init.add_listener(_on_init)
