"""Which pods there are, from the API (list and watch) or from a headless Service's DNS name."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from carousel.cluster.kube import Complaint, KubeApi, KubeError, KubeForbidden, KubeGone

logger = logging.getLogger("carousel.scaler")

_SHORTEST_WATCH_S = 1.0


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod: its identity (another after a restart under the same name), address, and whether it takes requests."""

    uid: str
    name: str
    address: str
    ready: bool


class PodSource(Protocol):
    """Keeps a list of pods current. ``on_change`` is called whenever the list changed."""

    on_change: Callable[[], None]

    @property
    def problem(self) -> str | None:
        """Why the list is not current; None while it is."""

    def pods(self) -> list[Pod]:
        """All known pods, ready or not."""

    def age(self) -> float:
        """For how many seconds the list has not been current; infinite before there was one."""

    async def run(self) -> None:
        """Keep the list current until cancelled."""


class _Freshness:
    """When a list was last known to be right. While ``held`` it is right now."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at: float | None = None
        self.held = False

    def touch(self) -> None:
        self._at = self._clock()

    def release(self) -> None:
        if self.held:
            self.held = False
            self.touch()

    def age(self) -> float:
        if self.held:
            return 0.0
        return float("inf") if self._at is None else self._clock() - self._at


class ApiPods:
    """Pods with certain labels, through list and watch.

    A pod counts as ready while its condition ``Ready`` is true and it is not being deleted.

    Args:
        api: to ask.
        selector: labels, as ``kubectl -l`` takes them.
        clock: seconds, monotonic.
    """

    def __init__(self, api: KubeApi, selector: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._api = api
        self._selector = selector
        self._pods: dict[str, Pod] = {}
        self._clock = clock
        self._fresh = _Freshness(clock)
        self._complaint = Complaint(logger, "the pods cannot be listed", longest_s=30.0)

    @property
    def problem(self) -> str | None:
        return self._complaint.problem

    def pods(self) -> list[Pod]:
        return list(self._pods.values())

    def age(self) -> float:
        return self._fresh.age()

    async def run(self) -> None:
        version = ""
        while True:
            try:
                if not version:
                    items, version = await self._api.list_pods(self._selector)
                    self._replace(items)
                    self._fresh.touch()
                began = self._clock()
                version = await self._watch(version)
                if self._clock() - began < _SHORTEST_WATCH_S:  # a server that ends watches at once is not to be flooded
                    await asyncio.sleep(_SHORTEST_WATCH_S)
            except KubeGone:
                self._fresh.release()
                version = ""
            except KubeError as error:
                self._fresh.release()
                version = ""
                hint = "a Role with pods: [list, watch] is needed" if isinstance(error, KubeForbidden) else ""
                await asyncio.sleep(self._complaint.failed(error, hint))

    async def _watch(self, version: str) -> str:
        """Follow events until the watch ends; the version to go on from."""
        try:
            async for event in self._api.watch_pods(self._selector, version):
                self._fresh.held = True
                self._complaint.worked()
                found = event.get("object")
                if not isinstance(found, dict):
                    continue
                version = str(found.get("metadata", {}).get("resourceVersion") or version)
                if event.get("type") in ("ADDED", "MODIFIED", "DELETED"):
                    self._apply(found, deleted=event["type"] == "DELETED")
        finally:
            self._fresh.release()
        return version

    def _replace(self, items: list[dict[str, Any]]) -> None:
        pods = [pod for item in items if (pod := read_pod(item)) is not None]
        self._pods = {pod.name: pod for pod in pods}
        self.on_change()

    def _apply(self, item: dict[str, Any], deleted: bool) -> None:
        name = str(item.get("metadata", {}).get("name", ""))
        pod = None if deleted else read_pod(item)
        if self._pods.get(name) == pod:
            return
        if pod is None:
            self._pods.pop(name, None)
        else:
            self._pods[name] = pod
        self.on_change()


def read_pod(item: dict[str, Any]) -> Pod | None:
    """A pod out of the API's JSON; None for one that has ended for good."""
    metadata, status = item.get("metadata") or {}, item.get("status") or {}
    if status.get("phase") in ("Succeeded", "Failed") or not metadata.get("name"):
        return None
    conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or () if isinstance(c, dict)}
    address = str(status.get("podIP") or "")
    ready = conditions.get("Ready") == "True" and not metadata.get("deletionTimestamp") and bool(address)
    return Pod(str(metadata.get("uid", "")), str(metadata["name"]), address, ready)


class DnsPods:
    """The addresses behind a headless Service: its ready pods, for DNS knows no others.

    Args:
        name: such as ``carousel-headless.models.svc``.
        interval_s: seconds between look-ups.
        clock: seconds, monotonic.
        resolve: look-up, for tests.
    """

    def __init__(
        self,
        name: str,
        interval_s: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        resolve: Callable[[str], Any] | None = None,
    ) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._name = name
        self._interval_s = interval_s
        self._pods: list[Pod] = []
        self._fresh = _Freshness(clock)
        self._resolve = resolve or addresses
        self._complaint = Complaint(logger, f"{name} cannot be resolved", first_s=interval_s, longest_s=10.0)

    @property
    def problem(self) -> str | None:
        return self._complaint.problem

    def pods(self) -> list[Pod]:
        return list(self._pods)

    def age(self) -> float:
        return self._fresh.age()

    async def run(self) -> None:
        while True:
            wait_s = self._interval_s
            try:
                found = [Pod(address, address, address, True) for address in await self._resolve(self._name)]
            except OSError as error:
                wait_s = self._complaint.failed(error)
            else:
                self._complaint.worked()
                self._fresh.touch()
                if found != self._pods:
                    self._pods = found
                    self.on_change()
            await asyncio.sleep(wait_s)


async def addresses(name: str) -> list[str]:
    """The addresses that a name has now, sorted. A name without any, such as a headless Service at zero, has none.

    Raises:
        OSError: the look-up failed.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)):
            return []
        raise
    return sorted({str(item[4][0]) for item in found})
