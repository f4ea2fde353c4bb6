"""KServe's model server with one model, its own signal handling and a shutdown that lets requests finish.

Imported late, by ``server.serve``, because it imports KServe. What differs from ``kserve.ModelServer``: both servers
stay open while the engine drains (new work gets 503 or UNAVAILABLE, ``/metrics`` and the probes keep answering), REST
and gRPC drain side by side, a failed start ends the process with its cause, and everything listens on the chosen host.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Generator
from typing import TYPE_CHECKING

import uvicorn
from fastapi import APIRouter, FastAPI
from grpc import aio
from kserve import ModelServer
from kserve.model import BaseKServeModel
from kserve.protocol.rest.server import metrics_handler
from kserve.protocol.rest.v1_endpoints import register_v1_endpoints
from kserve.protocol.rest.v2_endpoints import register_v2_endpoints
from kserve.utils.inference_client_factory import InferenceClientFactory

from carousel import faults, http_errors, routes
from carousel.config import Settings
from carousel.dataplane import CarouselDataPlane
from carousel.grpc_glue import Servicer, make_server
from carousel.http_protocol import GuardedProtocol, guarded
from carousel.lifecycle import Lifecycle
from carousel.middleware import RequestLayer
from carousel.predictor import CarouselModel
from carousel.routes_page import PageRoutes
from carousel.security import Security
from carousel.telemetry.accounts import Accounts
from carousel.telemetry.metrics import EngineMetrics, versions
from carousel.telemetry.notes import NoteTaker
from carousel.telemetry.statistics import RequestStatistics
from carousel.telemetry.usage_log import UsageLog
from carousel.tenancy.identity import Door
from carousel.tenancy.policy import Policies
from carousel.tenancy.quota import Governor

if TYPE_CHECKING:
    from carousel.telemetry.spans import Spans

logger = logging.getLogger("carousel.server")

# KServe answers V1 with a response class that FastAPI has deprecated; nobody who reads our log can change that.
warnings.filterwarnings("ignore", message="ORJSONResponse is deprecated")

#: Share of the drain's time that connections may take of which the clients do not know yet that they end.
UNTOLD_SHARE = 0.5
#: How long a client has, at the end of the delay, to send a further request over a connection, in seconds.
IDLE_SECONDS = 1.0
#: Share of the delay after which a gRPC connection is told to make place for a new one.
GRPC_AGE_SHARE = 0.75
#: How long answers that are complete may take to reach slow clients once the engine has stopped, in seconds.
FLUSH_SECONDS = 5


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: they would close the listener the moment SIGTERM arrives."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class CarouselServer(ModelServer):
    """Serves one :class:`CarouselModel` over REST and gRPC until it is told to stop.

    Args:
        settings: ports, host and limits.
        lifecycle: begun already; the server waits for it, drains it and ends it.
        http_socket: bound and listening.
        started_at: ``time.time()`` of the process's start, for the log.
        security: keys, policies and certificates; None: none of them.
        spans: traces; None: there are none.
        usage_log: open; closed when the server ends.
    """

    def __init__(
        self,
        settings: Settings,
        lifecycle: Lifecycle,
        http_socket: socket.socket,
        started_at: float,
        security: Security | None = None,
        spans: Spans | None = None,
        usage_log: UsageLog | None = None,
    ) -> None:
        super().__init__(
            http_port=http_socket.getsockname()[1],
            grpc_port=settings.grpc_port,
            workers=1,
            enable_grpc=settings.grpc,
            enable_docs_url=settings.enable_docs,
            enable_latency_logging=False,
            grace_period=math.ceil(settings.drain_seconds),
        )
        self.settings = settings
        self.lifecycle = lifecycle
        self.statistics = RequestStatistics()
        self.dataplane = CarouselDataPlane(self.registered_models, lifecycle, self.statistics)
        self.security = security or Security()
        self.spans = spans
        policies = self.security.policies
        self.door = self.security.door or Door(Governor(lambda: policies.current))
        self.metrics = EngineMetrics(
            settings.model_name,
            lifecycle.stats,
            lambda: lifecycle.ready,
            vllm_names=settings.vllm_metrics,
            trace_id=spans.trace_id if spans is not None else lambda request_id: None,
        )
        self.accounts = Accounts(settings, policies, usage_log)
        self.door.governor.on_refusal = self.accounts.metrics.refused
        self.exit_code = 0
        self.page: PageRoutes | None = None
        self._http_socket = http_socket
        self._started_at = started_at
        self._loop: asyncio.AbstractEventLoop | None = None
        self._asked = False  # to stop, maybe before there is a loop
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._signals = 0
        self._grpc_closing = asyncio.Event()

    def start(self, models: list[BaseKServeModel]) -> None:
        """Serve ``models`` (one :class:`CarouselModel`) until :meth:`request_stop` or a signal; see ``exit_code``.

        Raises:
            ValueError: for more or other models than that one, or more workers than one.
        """
        if len(models) != 1 or not isinstance(models[0], CarouselModel):
            raise ValueError("a Carousel server serves exactly one CarouselModel")
        if self.workers != 1:
            raise ValueError("workers > 1 would load the model once per process; scale with replicas instead")
        self.register_model(models[0])
        self.metrics.register()
        self.accounts.metrics.register()
        config = self._uvicorn_config(self.build_app(models[0]))
        try:
            with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
                runner.run(self._run(models[0], _Uvicorn(config)))
        finally:
            self.metrics.unregister()
            if self.spans is not None:
                self.spans.close()
            self.accounts.close()

    def build_app(self, model: CarouselModel) -> FastAPI:
        """The application: our routes, then KServe's, on an app of its own, so that a process can hold several."""
        app = FastAPI(
            title="Carousel",
            version=versions()["version"],
            openapi_url=None,  # routes.mount serves a document of our own, and /docs a page that loads nothing
        )
        refused = self.door.governor.num_refused
        self.page = PageRoutes(model, self.settings, lambda: refused) if self.settings.shows_page else None
        if self.settings.demo and self.page is None:
            logger.warning("--demo does nothing: the live page is off (--page %s)", self.settings.page)
        table = routes.Routes(model, self.dataplane, self.settings.allow_unload, self.accounts.book)
        routes.mount(app, table, docs=self.settings.enable_docs, page=self.page)
        root = APIRouter()
        root.add_api_route("/metrics", metrics_handler, methods=["GET"])
        app.include_router(root)
        register_v1_endpoints(app, self.dataplane, self.model_repository_extension)
        register_v2_endpoints(app, self.dataplane, self.model_repository_extension)
        http_errors.add_handlers(app)
        return app

    def _uvicorn_config(self, app: FastAPI) -> uvicorn.Config:
        layer = RequestLayer(
            app,
            max_body_bytes=self.settings.max_request_bytes,
            read_seconds=self.settings.read_timeout_seconds,
            draining=lambda: self.lifecycle.draining,
            closing=lambda: self.lifecycle.refusing,
            door=self.door,
            tracer=self.spans,
        )
        return uvicorn.Config(
            layer,
            http=guarded(self.settings.read_timeout_seconds),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            backlog=2048,
            timeout_keep_alive=self.settings.keep_alive_seconds,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            **self.security.uvicorn_options(),
        )

    def request_stop(self) -> None:
        """Begin to drain; called again, stop at once. Safe in any thread and in a signal handler."""
        loop = self._loop
        if loop is None:
            self._asked = True
        elif not loop.is_closed():
            loop.call_soon_threadsafe(self._note_stop)

    def _note_stop(self) -> None:
        self._signals += 1
        if self._signals == 1:
            logger.info("stopping, as asked: requests that run have %g s", self.settings.drain_seconds)
            self._stopping.set()
        else:
            logger.warning("stopping at once, as asked again")
            self._hurry.set()

    def _take_signals(self) -> None:
        assert self._loop is not None
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            self._loop.add_signal_handler(number, self._note_stop)

    async def _run(self, model: CarouselModel, http: _Uvicorn) -> None:
        self._loop = asyncio.get_running_loop()
        self._take_signals()
        if self._asked:
            self._note_stop()
        serving = asyncio.create_task(http.serve(sockets=[self._http_socket]))
        grpc_server = await self._start_grpc(model)
        grpc_text = f", gRPC on port {self.grpc_port}" if grpc_server is not None else ""
        kind = "HTTP" if self.security.tls is None else "HTTPS"
        logger.info("listening on %s: %s on port %d%s", self.settings.host, kind, self.http_port, grpc_text)
        following = asyncio.create_task(self.security.follow())
        costing = asyncio.create_task(self._keep_deletion_cost())
        loading = asyncio.create_task(self._load(model))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        seconds = self.settings.drain_seconds
        if not serving.done():
            seconds -= await self._leave(http)
        if not serving.done():
            # The flag that refuses new work must be up before this loop turns again, and drain() sets it first.
            finished = await self.lifecycle.drain(seconds, self._hurry)
            logger.log(
                logging.INFO if finished else logging.WARNING,
                "drained" if finished else "not all requests finished in time; the rest ended with an error",
            )
        for task in (loading, stopping, following, costing):
            task.cancel()
        http.should_exit = True
        http.force_exit = self._hurry.is_set()
        ending = [serving]
        if grpc_server is not None:
            self._grpc_closing.set()  # idle streams and health watches would outlast any grace
            grace = 0.2 if self._hurry.is_set() else float(FLUSH_SECONDS)
            ending.append(asyncio.create_task(grpc_server.stop(grace)))
        await asyncio.gather(*ending, return_exceptions=True)
        await InferenceClientFactory().close()
        await self.door.close()

    async def _leave(self, http: _Uvicorn) -> float:
        """Stay open for the delay and until every client knows, in seconds of the drain's time that this took.

        A stream that began before the signal could not say that it is its connection's last answer: the client's next
        request comes the moment that it ends, and is taken, too. What is idle meanwhile is closed.
        """
        delay = self.settings.shutdown_delay_seconds
        if not delay or self._hurry.is_set() or not self.lifecycle.leave():
            return 0.0
        logger.info("still taking requests for %g s, while clients turn elsewhere", delay)
        assert self._loop is not None
        await self._pause(delay)
        began = self._loop.time()
        last = began + UNTOLD_SHARE * self.settings.drain_seconds
        while not self._hurry.is_set() and self._loop.time() < last:
            connections = [item for item in http.server_state.connections if isinstance(item, GuardedProtocol)]
            for connection in connections:
                connection.close_if_idle(IDLE_SECONDS)
            if all(connection.told for connection in connections):
                break
            await self._pause(0.1)
        return self._loop.time() - began

    async def _pause(self, seconds: float) -> None:
        """Sleep, unless there is a hurry."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurry.wait()

    async def _keep_deletion_cost(self) -> None:
        if not self.settings.pod_deletion_cost:
            return
        from carousel.cluster.deletion_cost import DeletionCost

        lifecycle = self.lifecycle
        await DeletionCost(lifecycle.stats, lambda: lifecycle.draining).run()

    async def _start_grpc(self, model: CarouselModel) -> aio.Server | None:
        if not self.enable_grpc:
            return None
        servicer = Servicer(self.dataplane, self.model_repository_extension, model, self.settings.allow_unload)
        self._grpc_closing = servicer.closing
        try:
            server, self.grpc_port = make_server(
                servicer,
                self.settings.host,
                self.settings.grpc_port,
                self.settings.max_request_bytes,
                door=self.door,
                credentials=self.security.grpc_credentials(),
                max_age_s=GRPC_AGE_SHARE * self.settings.shutdown_delay_seconds,
                tracer=self.spans,
            )
        except OSError as error:
            logger.critical("%s; choose another port with --grpc-port, or --no-grpc", error)
            self._fail()
            return None
        await server.start()
        return server

    async def _load(self, model: CarouselModel) -> None:
        try:
            await model.start_engine()
            assert self.lifecycle.engine is not None
            timeline = self.lifecycle.engine.timeline
            timeline.observers += [self.metrics, self.statistics, NoteTaker(), self.door.governor]
            timeline.meters += self.accounts.meters()
            if self.spans is not None:
                timeline.observers.append(self.spans)
                timeline.watch(self.spans)
            faults.install(timeline, os.environ)
            self._weigh(self.security.policies.current)
            self.security.policies.on_change = self._weigh
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # Our own errors say what to do; anything else is a surprise, and its traceback is wanted.
            expected = type(error).__module__.startswith("carousel.")
            logger.critical("the model could not be loaded: %s", error, exc_info=None if expected else error)
            self._fail()
            return
        if self.lifecycle.ready:
            logger.info("ready in %.1f s: model %s", time.time() - self._started_at, self.settings.model_name)

    def _weigh(self, policies: Policies) -> None:
        """Tell the engine what share each tenant has by the policy file, if there is one."""
        if self.security.policies.path is None or self.lifecycle.engine is None:
            return
        self.lifecycle.engine.set_tenant_weights(policies.weights, policies.default.weight)
        if self.settings.policy != "fair" and {policies.default.weight, *policies.weights.values()} != {1.0}:
            logger.warning("the tenants' weights mean nothing under --policy %s, only under fair", self.settings.policy)

    def _fail(self) -> None:
        self.exit_code = 1
        self._hurry.set()
        self._stopping.set()
