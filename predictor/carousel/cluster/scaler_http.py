"""The scaler's admin server: health, metrics, state, ``POST /activate``, and what its other replicas ask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from carousel.cluster.activator import Activator
from carousel.cluster.demand import Targets
from carousel.cluster.outside import Outside
from carousel.cluster.scaler_grpc import ExternalScaler
from carousel.cluster.watcher import NoReading, Watcher

PREFIX = "carousel_scaler_"
_LONGEST_ASK_S = 86_400.0


class Admin:
    """The handlers.

    Args:
        watcher: knows the fleet.
        outside: what is held.
        scaler: counts KEDA's calls.
        targets: those of the flags; the metrics show their value.
        idle_s: for how long ``POST /activate`` asks when it does not say.
        activator: None where there is none.
    """

    def __init__(
        self,
        watcher: Watcher,
        outside: Outside,
        scaler: ExternalScaler,
        targets: Targets,
        idle_s: float,
        activator: Activator | None,
    ) -> None:
        self._watcher = watcher
        self._outside = outside
        self._scaler = scaler
        self._targets = targets
        self._idle_s = idle_s
        self._activator = activator
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self.started = False  # once a value could be given; what fails later is KEDA's to be told
        self.stopping = False

    def app(self) -> web.Application:
        """The application."""
        app = web.Application(client_max_size=64 * 1024)
        app.add_routes(
            [
                web.get("/livez", self.livez),
                web.get("/readyz", self.readyz),
                web.get("/metrics", self.metrics),
                web.get("/state", self.state),
                web.post("/activate", self.activate),
                web.get("/held", self.held),
                web.post("/held", self.told),
            ]
        )
        return app

    def ready(self) -> bool:
        """Whether KEDA should be sent here."""
        if not self.started:
            try:
                self._watcher.check()
            except NoReading:
                return False
            self.started = True
        return not self.stopping

    async def livez(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def readyz(self, request: web.Request) -> web.Response:
        if self.ready():
            return web.json_response({"status": "ready"})
        reason = "stopping"
        try:
            self._watcher.check()
        except NoReading as error:
            reason = str(error)
        return web.json_response({"status": "not ready", "reason": reason}, status=503)

    async def activate(self, request: web.Request) -> web.Response:
        """``POST /activate?seconds=N``: the target shall be active for N seconds."""
        text = request.query.get("seconds", "")
        try:
            seconds = float(text) if text else self._idle_s
        except ValueError:
            seconds = -1.0
        if not 0 < seconds <= _LONGEST_ASK_S:
            allowed = f"a number above 0, at most {_LONGEST_ASK_S:g}"
            return web.json_response({"error": f"seconds: got {text!r}, allowed: {allowed}"}, status=400)
        self._outside.activation.ask_for(seconds)
        return web.json_response({"active_seconds": seconds, "ready_pods": self._watcher.fleet.ready}, status=202)

    async def held(self, request: web.Request) -> web.Response:
        return web.json_response(self._outside.state())

    async def told(self, request: web.Request) -> web.Response:
        try:
            self._outside.learn(await request.json())
        except ValueError:
            return web.json_response({"error": "body: no JSON"}, status=400)
        return web.Response(status=204)

    async def state(self, request: web.Request) -> web.Response:
        """For people: what is known and what follows."""
        return web.json_response(self.facts())

    def facts(self) -> dict[str, Any]:
        """What is known of the fleet, and the value and target that KEDA would get without metadata."""
        fleet, held = self._watcher.fleet, self._outside.held()
        facts: dict[str, Any] = {
            "ready_pods": fleet.ready,
            "silent_pods": fleet.silent,
            "known_pods": len(self._watcher.source.pods()),
            "requests_running": fleet.requests_running,
            "requests_waiting": fleet.requests_waiting,
            "tokens_running": fleet.tokens_running,
            "tokens_waiting": fleet.tokens_waiting,
            "queue_seconds": fleet.queue_seconds,
            "occupancy": fleet.occupancy,
            "held_requests": held.requests,
            "scale_on": self._targets.scale_on,
            "target": self._targets.per_replica,
            "problem": self._watcher.source.problem,
        }
        try:
            facts["value"] = self._watcher.value(self._targets)
            facts["active"] = self._watcher.active()
        except NoReading as error:
            facts["problem"] = str(error)
        return facts

    async def metrics(self, request: web.Request) -> web.Response:
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    # ---- Collector

    def collect(self) -> Iterable[Metric]:
        """One family at a time, for prometheus_client."""
        facts = self.facts()
        age = self._watcher.source.age()
        gauges = (
            ("pods_ready", "Ready pods.", facts["ready_pods"]),
            ("pods_silent", "Ready pods whose load is not known.", facts["silent_pods"]),
            ("pods_known", "Pods, ready or not.", facts["known_pods"]),
            ("requests_running", "Requests in the pods' batches.", facts["requests_running"]),
            ("requests_waiting", "Requests in the pods' queues.", facts["requests_waiting"]),
            ("tokens_running", "Tokens that the pods' batches hold.", facts["tokens_running"]),
            ("tokens_waiting", "Tokens in the pods' queues.", facts["tokens_waiting"]),
            ("queue_seconds", "Sum of the pods' estimated queue seconds.", facts["queue_seconds"]),
            ("occupancy", "Sum of the pods' occupancies, each 0 to 1.", facts["occupancy"]),
            ("requests_held", "Requests that wait outside of any pod.", facts["held_requests"]),
            ("active", "1 while the target should be above zero.", float(facts.get("active", False))),
            ("target", "What one replica is worth, in the metric's unit.", facts["target"]),
            ("up", "1 while values may be served.", float("value" in facts)),
            ("list_age_seconds", "For how long the list of pods has not been current.", min(age, 1e9)),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(PREFIX + name, text, value=float(value))
        shown = GaugeMetricFamily(f"{PREFIX}value", "What KEDA is told, by what is scaled on.", labels=["scale_on"])
        if "value" in facts:
            shown.add_metric([facts["scale_on"]], facts["value"])
        yield shown
        counters = (
            ("looks", "Looks at the pods.", self._watcher.looks),
            ("readings_failed", "Pods that did not tell their load when asked.", self._watcher.readings.failures),
            ("calls", "Calls by KEDA.", self._scaler.calls),
        )
        for name, text, count in counters:
            yield CounterMetricFamily(PREFIX + name, text, value=count)
        if self._activator is not None:
            ended = CounterMetricFamily(
                f"{PREFIX}activator_requests", "Requests that the activator is done with.", labels=["outcome"]
            )
            for outcome, count in self._activator.counts.items():
                ended.add_metric([outcome], count)
            yield ended
            yield CounterMetricFamily(
                f"{PREFIX}activator_held_seconds", "Time that requests were held.", value=self._activator.held_seconds
            )
