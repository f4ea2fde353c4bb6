"""``serve``: from settings to a running server and back to an exit code.

Start-up is overlapped: the port opens first, then the model loads in a thread while KServe is imported here. KServe and
everything that imports it therefore stays out of this module's own imports.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from carousel.config import Settings
from carousel.lifecycle import EngineFactory, EngineLike, Lifecycle
from carousel.security import CredentialsUnusable, Security
from carousel.telemetry.logs import adopt, configure_logging
from carousel.telemetry.usage_log import UsageLogUnusable, open_usage_log
from carousel.tls import TlsUnusable

if TYPE_CHECKING:
    from carousel.serving import CarouselServer
    from carousel.telemetry.spans import Spans

logger = logging.getLogger("carousel.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def load_engine(settings: Settings) -> EngineLike:
    """Fetch and load the model, start the engine and warm it up. Blocking; imports torch.

    Raises:
        Exception: with a message that says what could not be done.
    """
    from carousel.standalone import fetch, load, spare_what_lives, start_engine

    engine = start_engine(load(fetch(settings), settings), settings)
    spare_what_lives()
    return engine


def serve(
    settings: Settings,
    *,
    engine_factory: EngineFactory = load_engine,
    on_server: Callable[[CarouselServer], None] | None = None,
) -> int:
    """Serve until SIGTERM or SIGINT.

    Args:
        settings: validated.
        engine_factory: loads the model and returns a started engine; called in a thread.
        on_server: told of the server before it starts, for those who embed it.

    Returns:
        0 after a clean stop, 1 when the port is taken, keys or certificates are no good, or the model could not be
        loaded (the log says why).
    """
    started_at = process_started_at()
    configure_logging(settings.log_level, settings.log_format, prompts=settings.log_prompts)
    for notice in settings.notices:
        logger.warning(notice)
    if changed := settings.changed():
        logger.info("settings: %s", ", ".join(f"{name}={value}" for name, value in changed.items()))
    try:
        security = Security.from_settings(settings)
        usage_log = open_usage_log(settings)
    except (CredentialsUnusable, TlsUnusable, UsageLogUnusable) as error:
        logger.critical("%s", error)
        return 1
    try:
        spans = make_spans(settings)
    except ValueError as error:
        logger.critical("%s", error)
        return 1
    try:
        http_socket = listen(settings.host, settings.http_port)
    except OSError as error:
        address = f"{settings.host}:{settings.http_port}"
        logger.critical("cannot listen on %s: %s; choose another with --host or --http-port", address, error)
        return 1
    import numpy  # noqa: F401  # before the loader's thread: torch and kserve would both begin to import it

    lifecycle = Lifecycle(settings, engine_factory)
    lifecycle.start()
    with http_socket, _early_signals() as early:
        with bare_arguments():
            from carousel.predictor import CarouselModel
            from carousel.serving import CarouselServer
        adopt("kserve", "kserve.trace", "uvicorn", "uvicorn.error", "uvicorn.access")
        server = CarouselServer(settings, lifecycle, http_socket, started_at, security, spans, usage_log)
        if on_server is not None:
            on_server(server)
        early.forward_to(server)
        server.start([CarouselModel(settings.model_name, lifecycle)])
    if lifecycle.loading:
        # The loader's thread is inside torch and cannot be stopped; an ordinary exit may crash on it.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(server.exit_code)
    logger.info("stopped")
    return server.exit_code


def make_spans(settings: Settings) -> Spans | None:
    """What sends traces, where they are wanted.

    Raises:
        ValueError: OpenTelemetry's packages are missing, or its variables ask for what there is not.
    """
    if not settings.traces:
        return None
    try:
        from carousel.telemetry.spans import Spans
    except ImportError as error:
        raise ValueError(f"--traces: {error}; install kserve-carousel[otel], or choose --no-traces") from None
    from carousel.telemetry.metrics import versions

    return Spans.from_environment(os.environ, settings.model_name, versions()["version"])


def listen(host: str, port: int) -> socket.socket:
    """A TCP socket that listens; connections wait in it until the server takes them.

    Raises:
        OSError: the address is taken, or not ours.
    """
    bare = host.strip("[]")
    if bare == "::":
        return socket.create_server((bare, port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    return socket.create_server((bare, port), family=family, backlog=2048)


def process_started_at() -> float:
    """When this process was started, as ``time.time()`` counts; where the system does not tell, now."""
    try:
        ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
        uptime = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()


@contextmanager
def bare_arguments() -> Generator[None, None, None]:
    """Hide the command line: KServe parses it at import, with abbreviations, and exits on what it does not like."""
    kept = sys.argv
    sys.argv = kept[:1]
    try:
        yield
    finally:
        sys.argv = kept


class _EarlySignals:
    """Remembers signals until there is a server to stop, and stops it with those that come before it takes its own."""

    def __init__(self) -> None:
        self.seen = False
        self.server: CarouselServer | None = None

    def note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if self.server is not None:
            self.server.request_stop()

    def forward_to(self, server: CarouselServer) -> None:
        self.server = server
        if self.seen:
            server.request_stop()


@contextmanager
def _early_signals() -> Generator[_EarlySignals, None, None]:
    early = _EarlySignals()
    if threading.current_thread() is not threading.main_thread():
        yield early
        return
    before = {number: signal.signal(number, early.note) for number in _SIGNALS}
    try:
        yield early
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
