"""What asks for pods and is in none: held requests and announced ones, here and at the scaler's other replicas.

The pods of a target at zero report nothing, so this is how it wakes: the activator holds a request, or somebody (a
gateway that holds requests itself, a schedule) says ``POST /activate``. Each replica tells the others at once, and asks
them every interval, so that it does not matter which of them KEDA is connected to.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from carousel.addresses import url_host
from carousel.cluster.demand import Held
from carousel.cluster.kube import Complaint
from carousel.cluster.pods import addresses

logger = logging.getLogger("carousel.scaler")

BYTES_PER_TOKEN = 4.0
"""Of a body of text or JSON, roughly; only for what is held, whose tokens nobody has counted."""

_TIMEOUT_S = 2.0


class Activation:
    """What this replica holds, and until when the target has been asked for.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = 0.0
        self.requests = 0
        self.body_bytes = 0
        self.on_change: Callable[[], None] = lambda: None

    def held(self) -> Held:
        """Requests that wait here for a pod."""
        return Held(self.requests, self.body_bytes / BYTES_PER_TOKEN)

    def hold(self, requests: int, body_bytes: int) -> None:
        """One more (or, negative, one less) is held."""
        before = self.requests
        self.requests += requests
        self.body_bytes += body_bytes
        if (before == 0) != (self.requests == 0):
            self.on_change()

    def ask_for(self, seconds: float) -> None:
        """The target shall be active for so long from now on."""
        self._until = max(self._until, self._clock() + seconds)
        self.on_change()

    def left(self) -> float:
        """Seconds for which the target has been asked for."""
        return max(0.0, self._until - self._clock())


class Outside:
    """This replica's :class:`Activation` and what the others told of theirs.

    Args:
        activation: of this replica.
        peers: name of a headless Service with all replicas behind it; empty: there are no others.
        port: of their admin servers.
        interval_s: between two questions.
        clock: seconds, monotonic.
        resolve: look-up, for tests; gives addresses, or addresses with ports.
    """

    def __init__(
        self,
        activation: Activation,
        peers: str = "",
        port: int = 9096,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        resolve: Callable[[str], Awaitable[list[str]]] = addresses,
    ) -> None:
        self.activation = activation
        self.identity = secrets.token_hex(8)
        self._peers = peers
        self._port = port
        self._interval_s = interval_s
        self._clock = clock
        self._resolve = resolve
        self._others: dict[str, tuple[float, Held, float]] = {}  # identity: when told, what is held, active until
        self._addresses: list[str] = []
        self._complaint = Complaint(logger, f"{peers} cannot be resolved", first_s=interval_s, longest_s=10.0)
        self._session: aiohttp.ClientSession | None = None
        self._telling: set[asyncio.Task[None]] = set()
        self.on_change: Callable[[], None] = lambda: None

    # ---- HeldSource

    def held(self) -> Held:
        """Everywhere."""
        now = self._clock()
        held = self.activation.held()
        for when, theirs, _ in self._others.values():
            if now - when <= self._memory_s():
                held = held + theirs
        return held

    def activated(self) -> bool:
        """Whether anybody has asked for the target, and the time that was asked for is not over."""
        now = self._clock()
        return self.activation.left() > 0 or any(until > now for _, _, until in self._others.values())

    # ---- between replicas

    def _memory_s(self) -> float:
        return 3 * self._interval_s + _TIMEOUT_S

    def state(self) -> dict[str, Any]:
        """What the others are told."""
        held = self.activation.held()
        return {
            "identity": self.identity,
            "held_requests": held.requests,
            "held_tokens": held.tokens,
            "active_seconds": self.activation.left(),
        }

    def learn(self, state: Any) -> None:
        """Another replica has told its state; what is no such thing, or our own, is let be."""
        try:
            identity = str(state["identity"])
            held = Held(float(state["held_requests"]), float(state["held_tokens"]))
            active_s = min(float(state["active_seconds"]), 86_400.0)
        except (TypeError, KeyError, ValueError):
            return
        if identity == self.identity or not (held.requests >= 0 and held.tokens >= 0 and active_s >= 0):
            return
        now = self._clock()
        self._others = {name: known for name, known in self._others.items() if self._current(known, now)}
        before = self._others.get(identity)
        self._others[identity] = (now, held, now + active_s)
        if before is None or (before[1].requests > 0) != (held.requests > 0) or active_s > 0:
            self.on_change()

    def _current(self, known: tuple[float, Held, float], now: float) -> bool:
        return now - known[0] <= self._memory_s() or known[2] > now

    def tell(self) -> None:
        """Tell the others now, without waiting."""
        if self._peers:
            task = asyncio.ensure_future(self._tell())
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell(self) -> None:
        await asyncio.gather(*(self._exchange(address, post=True) for address in self._addresses))

    async def run(self) -> None:
        """Ask the others every interval, until cancelled."""
        if not self._peers:
            await asyncio.Event().wait()
        while True:
            wait_s = self._interval_s
            try:
                self._addresses = await self._resolve(self._peers)
            except OSError as error:
                wait_s = self._complaint.failed(error)
            else:
                self._complaint.worked()
                await asyncio.gather(*(self._exchange(address, post=False) for address in self._addresses))
            await asyncio.sleep(wait_s)

    async def _exchange(self, address: str, post: bool) -> None:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            self._session = aiohttp.ClientSession(timeout=timeout, trust_env=False)
        where = address if "/" in address else f"http://{url_host(address)}:{self._port}"
        try:
            if post:
                async with self._session.post(f"{where}/held", json=self.state()):
                    return
            async with self._session.get(f"{where}/held") as response:
                if response.status == 200:
                    self.learn(await response.json())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            logger.debug("replica %s: %s", address, error)  # it starts, or ends; what it held is forgotten in time

    async def close(self) -> None:
        """Close the connections."""
        for task in self._telling:
            task.cancel()
        if self._session is not None:
            await self._session.close()
            self._session = None
