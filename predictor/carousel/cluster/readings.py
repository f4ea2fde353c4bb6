"""What the pods report, asked again and again, with the last good answer of each kept for a bounded time."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import aiohttp

from carousel.addresses import url_host
from carousel.cluster.demand import Fleet, Held, PodLoad, UnreadableLoad, read_load, total
from carousel.cluster.pods import Pod

logger = logging.getLogger("carousel.scaler")

_AT_ONCE = 64
_MAX_ANSWER_BYTES = 64 * 1024


def client_tls(ca_file: str) -> ssl.SSLContext | bool:
    """TLS to pods, whose certificates name a Service and not an address: the authority counts, the name does not."""
    if not ca_file:
        return True
    context = ssl.create_default_context(cafile=str(Path(ca_file)))
    context.check_hostname = False
    return context


class Readings:
    """The newest load of every pod.

    Args:
        port: of the pods' HTTP server.
        timeout_s: for one answer.
        stale_s: how long an answer is good for when no newer one comes.
        ca_file: authorities (PEM) of the pods' certificates; empty: they serve plain HTTP.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        port: int,
        timeout_s: float,
        stale_s: float,
        ca_file: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = port
        self._timeout_s = timeout_s
        self._stale_s = stale_s
        self._scheme = "https" if ca_file else "http"
        self._tls = client_tls(ca_file)
        self._clock = clock
        self._known: dict[tuple[str, str], tuple[float, PodLoad]] = {}  # by uid and address
        self._complained: set[tuple[str, str]] = set()
        self._session: aiohttp.ClientSession | None = None
        self.failures = 0
        self.served_at: float | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def collect(self, pods: Iterable[Pod]) -> None:
        """Ask every ready pod at once, and forget those that are not there any more."""
        asked = [pod for pod in pods if pod.ready]
        keys = {(pod.uid, pod.address) for pod in asked}
        self._known = {key: value for key, value in self._known.items() if key in keys}
        self._complained &= keys
        if self._session is None:
            connector = aiohttp.TCPConnector(ssl=self._tls, limit=_AT_ONCE)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        await asyncio.gather(*(self._ask(self._session, pod) for pod in asked))

    async def _ask(self, session: aiohttp.ClientSession, pod: Pod) -> None:
        key = (pod.uid, pod.address)
        url = f"{self._scheme}://{url_host(pod.address)}:{self._port}/load"
        try:
            async with session.get(url, timeout=aiohttp.ClientTimeout(total=self._timeout_s)) as response:
                if response.status != 200:
                    raise UnreadableLoad(f"HTTP {response.status}")
                load = read_load(json.loads(await response.content.read(_MAX_ANSWER_BYTES)))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self.failures += 1
            if key not in self._complained:
                self._complained.add(key)
                logger.warning("pod %s does not tell its load: %s: %s", pod.name, url, error or type(error).__name__)
            return
        if key in self._complained:
            self._complained.discard(key)
            logger.info("pod %s tells its load again", pod.name)
        now = self._clock()
        before = self._known.get(key)
        if before is not None and load.admitted != before[1].admitted:
            self.served_at = now  # something came and went between two looks
        self._known[key] = (now, load)

    def fleet(self, pods: Iterable[Pod], held: Held) -> Fleet:
        """Sums over the ready pods; one whose last answer is older than ``stale_s`` (or never came) is silent."""
        now = self._clock()
        loads: list[PodLoad] = []
        silent = 0
        for pod in pods:
            if not pod.ready:
                continue
            known = self._known.get((pod.uid, pod.address))
            if known is None or now - known[0] > self._stale_s:
                silent += 1
            else:
                loads.append(known[1])
        return total(loads, silent, held)

    def load_of(self, pod: Pod) -> PodLoad | None:
        """The last answer of a pod, whatever its age."""
        known = self._known.get((pod.uid, pod.address))
        return None if known is None else known[1]
