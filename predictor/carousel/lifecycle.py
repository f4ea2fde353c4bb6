"""The life of the engine inside the server: loading, ready, leaving, draining, stopped or failed.

The HTTP port opens while the model still loads, in a thread of its own, beside the import of everything that serving
needs. Whoever wants the engine asks :meth:`Lifecycle.require`, which refuses with the reason when there is none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from carousel.engine.errors import EngineUnavailable
from carousel.engine.events import Glance
from carousel.engine.request import GenerationRequest, Output
from carousel.engine.timeline import EngineStats, Timeline

if TYPE_CHECKING:
    from carousel.config import Settings

logger = logging.getLogger("carousel.lifecycle")

#: What a refused client is told to wait (seconds) while there is no measurement to go by.
RETRY_LOADING_S = 5.0
RETRY_DRAINING_S = 5.0
RETRY_FAILED_S = 30.0


class StreamLike(Protocol):
    """A running request: deltas until every choice has a finish reason; leaving the context cancels it."""

    request_id: str
    prompt_tokens: int

    def cancel(self) -> Any: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any: ...
    def __aiter__(self) -> AsyncIterator[Output]: ...


class EngineLike(Protocol):
    """What the server needs of an engine; ``carousel.engine.engine.Engine`` is one."""

    @property
    def ready(self) -> bool: ...
    @property
    def alive(self) -> bool: ...
    @property
    def draining(self) -> bool: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def timeline(self) -> Timeline: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def model_name(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def generation_defaults(self) -> dict[str, Any]: ...

    def submit(self, request: GenerationRequest) -> StreamLike: ...
    def stats(self) -> EngineStats: ...
    def glance(self, take: Callable[[Glance], None]) -> bool: ...

    def set_tenant_weights(self, weights: Mapping[str, float], default: float) -> object: ...
    async def drain(self, timeout_s: float) -> bool: ...
    def stop(self) -> None: ...


EngineFactory = Callable[["Settings"], EngineLike]


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    LEAVING = "leaving"
    DRAINING = "draining"
    STOPPED = "stopped"
    FAILED = "failed"


class Lifecycle:
    """Owns the engine. Everything but :meth:`start` belongs to the event loop's thread.

    Args:
        settings: handed to the factory.
        factory: loads the model, starts the engine and returns it warmed up; blocking, called in a thread.
    """

    def __init__(self, settings: Settings, factory: EngineFactory) -> None:
        self.settings = settings
        self._factory = factory
        self._loading: Future[EngineLike] = Future()
        self._engine: EngineLike | None = None
        self._state = State.LOADING
        self._failure: str | None = None

    def start(self) -> None:
        """Begin to load, in a daemon thread: it must not keep a process alive that was told to stop meanwhile."""
        threading.Thread(target=self._load, name="carousel-loader", daemon=True).start()

    def _load(self) -> None:
        try:
            self._loading.set_result(self._factory(self.settings))
        except BaseException as error:  # SystemExit in a thread would otherwise vanish
            self._loading.set_exception(error)

    async def wait_loaded(self) -> EngineLike:
        """Wait until the engine is ready.

        Raises:
            Exception: whatever the factory raised; the state is then ``FAILED``.
        """
        try:
            engine = await asyncio.shield(asyncio.wrap_future(self._loading))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._state, self._failure = State.FAILED, f"{type(error).__name__}: {error}"
            raise
        self._engine = engine
        if self._state is State.LOADING:
            self._state = State.READY
        return engine

    @property
    def loading(self) -> bool:
        """Whether the loader thread still runs."""
        return not self._loading.done()

    @property
    def engine(self) -> EngineLike | None:
        """The engine, once it is loaded, in whatever state."""
        return self._engine

    @property
    def state(self) -> State:
        turning = self._state in (State.READY, State.LEAVING, State.DRAINING) and self._engine is not None
        if turning and self.failure is not None:
            return State.FAILED
        return self._state

    @property
    def failure(self) -> str | None:
        """Why the engine is dead or could not be loaded; None while nothing is wrong."""
        if self._failure is None and self._engine is not None and self._state is not State.STOPPED:
            if self._engine.failure is not None:
                return self._engine.failure
            if not self._engine.alive:
                return "the engine thread does not turn"
        return self._failure

    @property
    def ready(self) -> bool:
        """Whether a request that arrives now would be taken."""
        return self._state is State.READY and self._engine is not None and self._engine.ready

    @property
    def repository_state(self) -> str:
        """The state in the words of the model repository protocol: READY, LOADING, UNLOADING or UNAVAILABLE."""
        if self.ready:
            return "READY"
        states = {State.LOADING: "LOADING", State.LEAVING: "UNLOADING", State.DRAINING: "UNLOADING"}
        return states.get(self.state, "UNAVAILABLE")

    @property
    def live(self) -> bool:
        """False only for an engine that was loaded and is dead or stuck, or that could not be loaded."""
        return self.failure is None

    @property
    def draining(self) -> bool:
        """Whether the server is on its way out, be it that it still takes requests."""
        return self._state in (State.LEAVING, State.DRAINING, State.STOPPED)

    @property
    def refusing(self) -> bool:
        """Whether new requests are refused because the server is on its way out."""
        return self._state in (State.DRAINING, State.STOPPED)

    def leave(self) -> bool:
        """No longer be ready, and take requests all the same; False if there is no engine that could."""
        if self.state is not State.READY:
            return False
        self._state = State.LEAVING
        return True

    def require(self) -> EngineLike:
        """The engine, to submit work to.

        Raises:
            EngineUnavailable: while it loads or drains, and after it failed.
        """
        state = self.state
        if state in (State.READY, State.LEAVING) and self._engine is not None:
            return self._engine
        if state is State.LOADING:
            raise EngineUnavailable("the model is still loading", RETRY_LOADING_S)
        if state is State.FAILED:
            raise EngineUnavailable(f"the engine has failed: {self.failure}", RETRY_FAILED_S)
        raise EngineUnavailable("the server is shutting down", RETRY_DRAINING_S)

    def stats(self) -> EngineStats:
        """The engine's snapshot, all zero while it loads."""
        return EngineStats() if self._engine is None else self._engine.stats()

    async def unload(self) -> None:
        """Drain and stop the engine for good, on a client's request; the server itself stays."""
        logger.warning("unloading the model on a client's request")
        await self.drain(self.settings.drain_seconds, asyncio.Event())

    async def drain(self, timeout_s: float, hurry: asyncio.Event) -> bool:
        """Refuse new work, let the rest finish for ``timeout_s`` s or until ``hurry`` is set, then end what is left.

        An engine that is dead or stuck finishes nothing, and is not waited for.

        Returns:
            whether everything that had been admitted finished by itself.
        """
        if self.failure is not None:
            timeout_s = 0.0
        self._state = State.DRAINING
        if self._engine is None:
            self._state = State.STOPPED
            return True
        draining = asyncio.ensure_future(self._engine.drain(timeout_s))
        hurried = asyncio.ensure_future(hurry.wait())
        # The engine keeps its own time, and then tells those that are left; the margin only guards against one that is
        # stuck.
        await asyncio.wait((draining, hurried), timeout=timeout_s + 3.0, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        complete = draining.done() and not draining.cancelled() and draining.exception() is None and draining.result()
        if not draining.done():
            draining.cancel()
        stopping = asyncio.get_running_loop().run_in_executor(None, self._engine.stop)
        done, _ = await asyncio.wait((stopping,), timeout=5.0)
        if not done:
            logger.error("the engine thread did not stop in 5 s; leaving without it")
        self._state = State.STOPPED
        return bool(complete)
