"""Locust's view of the arrivals. A shape of locust's says how many users there are; here that is one or a few for each
process, which send what is due, or under ``closed`` as many as requests shall be in flight."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from locust import LoadTestShape
from locust.runners import MasterRunner

from loadtest.options import protocols_of, shape_of
from loadtest.users import USERS


class TrafficShape(LoadTestShape):
    """Keeps the users there until every request has ended, or ``--drain`` seconds after the last was due.

    Args:
        options: see ``loadtest.options``.
        done: whether every request has ended.
    """

    use_common_options = False

    def __init__(self, options: Any, done: Callable[[], bool]) -> None:
        super().__init__()
        self._options, self._done = options, done

    def _users(self) -> int:
        if self._options.shape == "closed":
            return self._options.concurrency
        processes = self.runner.worker_count if isinstance(self.runner, MasterRunner) else 1
        return max(1, processes) * len(protocols_of(self._options))

    def _end(self) -> float:
        """Seconds after which what is still open is given up; infinite where the workload alone says how long it is."""
        duration = shape_of(self._options).duration
        return math.inf if math.isinf(duration) else duration + self._options.drain

    def tick(self) -> tuple[int, float] | None:
        """For locust, once a second."""
        if self._done() or self.get_run_time() > self._end():
            return None
        assert self.runner is not None
        self.runner.environment.user_classes = [USERS[protocol] for protocol in protocols_of(self._options)]
        users = self._users()
        return users, float(users)
