"""Keeps this pod's deletion cost at the tokens that it holds, so that a scale-in takes the idlest pod.

Among ready pods the ReplicaSet controller deletes the one with the lowest
``controller.kubernetes.io/pod-deletion-cost`` first; a pod without it counts as 0. The cost is what would be lost or
waited for: tokens of running sequences and tokens that wait. It is the largest of the last interval, patched only when
it has changed by a quarter and not more often than once an interval: each patch is a write to etcd and news for
everybody who watches pods.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping

from carousel.cluster.demand import Damper
from carousel.cluster.kube import Complaint, KubeApi, KubeError, KubeForbidden, KubeMissing
from carousel.engine.timeline import EngineStats

logger = logging.getLogger("carousel.deletion_cost")

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
LARGEST = 2**31 - 1
INTERVAL_S = 10.0
"""Seconds between two patches, at least."""

_SAMPLE_S = 1.0
_CHANGE = 0.25
_LONGEST_PAUSE_S = 300.0


def cost_of(stats: EngineStats) -> int:
    """The cost of deleting a pod, in tokens; 0 only if it has nothing to do."""
    tokens = stats.num_tokens_running + stats.num_tokens_waiting
    return min(max(tokens, stats.live), LARGEST)


class CostFilter:
    """Decides when a cost is worth a patch.

    Args:
        interval_s: between two patches, and over which the cost is the largest.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._peak = Damper(interval_s)
        self._patched: int | None = None
        self._patched_at = 0.0

    def due(self, now: float, cost: int) -> int | None:
        """Take a sample in. Returns the cost that should be patched now; None when the last one will do."""
        self._peak.add(now, cost)
        peak = int(self._peak.value(now) or 0)
        if self._patched is None:
            return peak
        if now - self._patched_at < self._interval_s or peak == self._patched:
            return None
        # Idle and nearly idle are what the controller must be able to tell apart.
        small = abs(peak - self._patched) < _CHANGE * max(peak, self._patched)
        return None if small and peak and self._patched else peak

    def patched(self, now: float, cost: int) -> None:
        """The patch has been accepted."""
        self._patched, self._patched_at = cost, now


class DeletionCost:
    """Patches the cost until cancelled; never raises for what the API does.

    Args:
        stats: the engine's snapshot.
        leaving: whether the pod is on its way out: nothing is patched then.
        environ: has ``POD_NAME`` and ``POD_NAMESPACE``, from the downward API.
        connect: makes the client, given the namespace; None: that of the cluster.
        clock: seconds, monotonic.
        sample_s: seconds between two looks at the engine.
        interval_s: seconds between two patches.
    """

    def __init__(
        self,
        stats: Callable[[], EngineStats],
        leaving: Callable[[], bool] = lambda: False,
        environ: Mapping[str, str] = os.environ,
        connect: Callable[[str], KubeApi] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sample_s: float = _SAMPLE_S,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._stats = stats
        self._leaving = leaving
        self._namespace = environ.get("POD_NAMESPACE", "")
        self._pod = environ.get("POD_NAME", "") or socket.gethostname()
        self._connect = connect or KubeApi.in_cluster
        self._clock = clock
        self._sample_s = sample_s
        self._filter = CostFilter(interval_s)
        self._complaint = Complaint(
            logger,
            "the pod-deletion cost is not kept: a scale-in may take a busy pod",
            first_s=interval_s,
            longest_s=max(_LONGEST_PAUSE_S, interval_s),
        )

    @property
    def problem(self) -> str | None:
        """Why the last patch failed; None if it did not."""
        return self._complaint.problem

    async def run(self) -> None:
        """Look at the engine every second and patch what is due."""
        try:
            api = self._connect(self._namespace)
        except KubeError as error:
            self._complaint.failed(error)
            return  # no token will be mounted while this pod lives
        async with api:
            while True:
                pause_s = await self._turn(api)
                await asyncio.sleep(pause_s)

    async def _turn(self, api: KubeApi) -> float:
        """One look. Returns seconds until the next."""
        now = self._clock()
        due = self._filter.due(now, cost_of(self._stats()))
        if due is None or self._leaving():
            return self._sample_s
        try:
            await api.patch_pod(self._pod, {ANNOTATION: str(due)})
        except KubeError as error:
            return self._complaint.failed(error, _hint(error))
        self._complaint.worked()
        self._filter.patched(now, due)
        logger.debug("pod-deletion cost %d", due)
        return self._sample_s


def _hint(error: KubeError) -> str:
    if isinstance(error, KubeForbidden):
        return "the pod's service account needs a Role with pods: [patch]"
    if isinstance(error, KubeMissing):
        return "set POD_NAME and POD_NAMESPACE from the downward API (metadata.name, metadata.namespace)"
    return ""
