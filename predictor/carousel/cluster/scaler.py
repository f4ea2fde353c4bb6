"""``carousel scaler``: puts the parts together and runs them until SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress

from aiohttp import web
from grpc import aio

from carousel.cluster.activator import Activator
from carousel.cluster.kube import KubeApi, KubeError
from carousel.cluster.outside import Activation, Outside
from carousel.cluster.pods import ApiPods, DnsPods, PodSource
from carousel.cluster.readings import Readings
from carousel.cluster.scaler_grpc import ExternalScaler, ScalerHealth, make_server
from carousel.cluster.scaler_http import Admin
from carousel.cluster.scaler_options import ScalerOptions, load_options
from carousel.cluster.watcher import Watcher
from carousel.telemetry.logs import configure_logging

logger = logging.getLogger("carousel.scaler")

_GRPC_GRACE_S = 1.0
_LONGEST_ANSWER_S = 3.0


class Scaler:
    """The parts of one scaler.

    Args:
        options: validated.

    Raises:
        KubeUnreachable: ``--pod-selector`` was given, and this is no pod with a service account.
        OSError: ``--pod-tls-ca`` cannot be read.
    """

    def __init__(self, options: ScalerOptions) -> None:
        self.options = options
        self.api: KubeApi | None = None
        self.source = self._make_source()
        timeout_s = min(max(options.interval_seconds, 0.5), _LONGEST_ANSWER_S)
        self.readings = Readings(options.pod_port, timeout_s, options.stale_seconds, options.pod_tls_ca)
        self.activation = Activation()
        peers_s = min(options.interval_seconds, 1.0)
        self.outside = Outside(self.activation, options.peers_dns, options.admin_port, peers_s)
        self.watcher = Watcher(
            self.source,
            self.readings,
            self.outside,
            interval_s=options.interval_seconds,
            stale_s=options.stale_seconds,
            window_s=options.scale_in_seconds,
            idle_s=options.idle_seconds,
        )
        self.activator = self._make_activator()
        self.grpc = ExternalScaler(self.watcher, options.targets)
        self.admin = Admin(self.watcher, self.outside, self.grpc, options.targets, options.idle_seconds, self.activator)
        self._announcing: set[asyncio.Task[None]] = set()
        self.source.on_change = self._pods_changed
        self.activation.on_change = self._asked
        self.outside.on_change = self._announce

    def _make_source(self) -> PodSource:
        options = self.options
        if options.pod_dns:
            return DnsPods(options.pod_dns, options.interval_seconds)
        self.api = KubeApi.in_cluster(options.pod_namespace, options.api_server)
        return ApiPods(self.api, options.pod_selector)

    def _make_activator(self) -> Activator | None:
        options = self.options
        if not options.activator_port:
            return None
        return Activator(
            self.source,
            self.readings,
            self.activation,
            pod_port=options.pod_port,
            ca_file=options.pod_tls_ca,
            max_requests=options.activator_max_requests,
            max_bytes=options.activator_max_bytes,
            max_body_bytes=options.max_request_bytes,
            wait_s=options.activator_wait_seconds,
        )

    def _pods_changed(self) -> None:
        if self.activator is not None:
            self.activator.pods_changed()
        self.watcher.poke()

    def _asked(self) -> None:
        self.outside.tell()
        self._announce()

    def _announce(self) -> None:
        task = asyncio.ensure_future(self.watcher.announce())
        self._announcing.add(task)
        task.add_done_callback(self._announcing.discard)
        self.watcher.poke()

    async def run(self, stop: asyncio.Event, on_ready: Callable[[Scaler], None] | None = None) -> None:
        """Serve until ``stop`` is set.

        Args:
            stop: ends it.
            on_ready: told once all ports are open.

        Raises:
            OSError: a port cannot be had.
        """
        options = self.options
        async with AsyncExitStack() as stack:
            server, self.scaler_port = make_server(
                self.grpc, ScalerHealth(self.admin.ready), options.host, options.scaler_port
            )
            admin = await _serve(self.admin.app(), options.host, options.admin_port, 1.0)
            stack.push_async_callback(admin.cleanup)
            self.admin_port = _port(admin)
            proxy = None
            if self.activator is not None:
                proxy = await _serve(self.activator.app(), options.host, options.activator_port, options.drain_seconds)
                stack.push_async_callback(proxy.cleanup)
                self.activator_port = _port(proxy)
            await server.start()
            jobs = [asyncio.create_task(job) for job in (self.source.run(), self.watcher.run(), self.outside.run())]
            stack.push_async_callback(self._close, jobs)
            logger.info(
                "listening on %s: gRPC for KEDA on port %d, admin on %d%s",
                options.host,
                self.scaler_port,
                self.admin_port,
                f", activator on {self.activator_port}" if proxy else "",
            )
            if on_ready is not None:
                on_ready(self)
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((stopping, *jobs), return_when=asyncio.FIRST_COMPLETED)
            await self._end(server, proxy)
            stopping.cancel()
            for job in jobs:
                if job.done() and not job.cancelled() and (error := job.exception()) is not None:
                    raise error

    async def _end(self, server: aio.Server, proxy: web.AppRunner | None) -> None:
        """Stop in an order in which nobody is cut off: what passes the proxy may finish while pods are known."""
        self.admin.stopping = True
        logger.info("stopping in %g s", self.options.shutdown_delay_seconds)
        await asyncio.sleep(self.options.shutdown_delay_seconds)
        if proxy is not None:
            await proxy.cleanup()
        self.grpc.closing.set()
        await server.stop(_GRPC_GRACE_S)

    async def _close(self, jobs: Sequence[asyncio.Task[None]]) -> None:
        for job in [*jobs, *self._announcing]:
            job.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await job
        await self.readings.close()
        await self.outside.close()
        if self.activator is not None:
            await self.activator.close()
        if self.api is not None:
            await self.api.close()


async def _serve(app: web.Application, host: str, port: int, drain_s: float) -> web.AppRunner:
    """An application on its own port.

    Raises:
        OSError: the port cannot be had.
    """
    # Cancelled handlers are how the activator learns that a client has left.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=drain_s)
    await runner.setup()
    try:
        await web.TCPSite(runner, host.strip("[]"), port, backlog=1024).start()
    except OSError as error:
        await runner.cleanup()
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return runner


def _port(runner: web.AppRunner) -> int:
    return int(runner.addresses[0][1])


async def _main(options: ScalerOptions) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await Scaler(options).run(stop)
    except (KubeError, OSError) as error:
        logger.critical("%s", error)
        return 1
    logger.info("stopped")
    return 0


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the command.

    Returns:
        0 after a clean stop; 1 when a port is taken or this is no pod and should be one (the log says which).

    Raises:
        SettingsError: the flags or variables are no good.
    """
    options, notices = load_options(argv, environ)
    configure_logging(options.log_level, options.log_format)
    for notice in notices:
        logger.warning(notice)
    return asyncio.run(_main(options))
