"""What is left of each tenant's quotas, and the refusal when nothing is.

Requests and tokens a minute are buckets that fill steadily (a limit of 60 gives one a second, and at most 60 at once).
Tokens are paid when they are known: a prompt's when the engine has taken it, an answer's at its end. So a bucket may be
overdrawn, and nobody gets anything until it has filled up above zero; no request is too large to be ever taken.
Concurrent requests count each choice of each prompt, because each takes a slot of the batch.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from carousel.engine.errors import InvalidRequest
from carousel.engine.request import GenerationRequest
from carousel.engine.timeline import RequestRecord, StepRecord
from carousel.protocols.errors import QuotaExceeded
from carousel.tenancy.policy import Policies, TenantPolicy

MAX_TENANTS = 10_000
"""Tenants whose buckets are remembered; beyond, the ones not seen for longest begin anew with full ones."""

FIRST_WAIT_S = 1.0
"""What is told to who has too many requests at once, before any call of the tenant has ended."""

LONGEST_WAIT_S = 60.0
_MINUTE = 60.0
_WORDS = {"requests": "requests a minute", "tokens": "tokens a minute"}


class _Bucket:
    """Fills at ``limit`` a minute up to ``limit``. Begins full."""

    __slots__ = ("at", "level", "limit")

    def __init__(self, limit: int, now: float) -> None:
        self.limit, self.level, self.at = limit, float(limit), now

    def fill(self, limit: int, now: float) -> None:
        """Bring it to the present, under a limit that may be a new one."""
        self.limit = limit
        self.level = min(float(limit), self.level + max(0.0, now - self.at) * limit / _MINUTE)
        self.at = now

    def wait(self, wanted: float) -> float:
        """Seconds until ``wanted``, or everything there can be, is there."""
        return max(0.0, min(wanted, self.limit) - self.level) * _MINUTE / self.limit


class _Account:
    """Of one tenant."""

    __slots__ = ("buckets", "call_s", "live")

    def __init__(self) -> None:
        self.buckets: dict[str, _Bucket] = {}
        self.live = 0
        self.call_s = FIRST_WAIT_S  # how long its calls take, smoothed

    def bucket(self, name: str, limit: int, now: float) -> _Bucket:
        bucket = self.buckets.get(name)
        if bucket is None:
            bucket = self.buckets[name] = _Bucket(limit, now)
        bucket.fill(limit, now)
        return bucket


class Ticket:
    """A call that was let in. ``leave`` when it is over, however it ended."""

    def __init__(self, governor: Governor, tenant: str, places: int, started: float) -> None:
        self._governor, self._tenant, self._places, self._started = governor, tenant, places, started

    def prompt(self, tokens: int) -> None:
        """One of its prompts has this many tokens."""
        self._governor.spent(self._tenant, tokens)

    def leave(self) -> None:
        self._governor._left(self._tenant, self._places, self._started)
        self._places = 0


class Governor:
    """Holds every tenant to its quotas. Safe in any thread.

    Args:
        policies: those in force, at any moment.
        clock: seconds, monotonic.

    Attributes:
        on_refusal: told of each, by tenant and quota; must be quick.
        num_refused: how many each quota has refused.
    """

    def __init__(self, policies: Callable[[], Policies], clock: Callable[[], float] = time.monotonic) -> None:
        self._policies = policies
        self._clock = clock
        self._lock = threading.Lock()
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self.on_refusal: Callable[[str, str], None] = lambda tenant, quota: None
        self.num_refused: Counter[str] = Counter()

    @property
    def policies(self) -> Policies:
        return self._policies()

    def peek(self, tenant: str) -> None:
        """Refuse what :meth:`enter` would refuse whatever it was, before it is read.

        Raises:
            QuotaExceeded: the tenant could not have a single request now.
        """
        with self._lock:
            self._check(tenant, self._policies().of(tenant), 1, 1, self._clock())

    def enter(self, tenant: str, requests: Sequence[GenerationRequest]) -> Ticket:
        """Let all requests of a call in, or none, and set what the tenant's policy says of them.

        Raises:
            QuotaExceeded: later it may be let in.
            InvalidRequest: never; or a priority that the tenant may not have.
        """
        policies = self._policies()
        policy = policies.of(tenant)
        places = sum(request.sampling.n for request in requests)
        limit = policy.concurrent_requests
        if limit is not None and places > limit:
            raise InvalidRequest("concurrent requests", places, f"at most {limit} at once for tenant {tenant!r}")
        for request in requests:
            request.priority = allowed_priority(policies, policy, tenant, request.priority)
            request.queue_share = policy.queue_share
        with self._lock:
            now = self._clock()
            self._check(tenant, policy, len(requests), places, now)
            account = self._account(tenant)
            if policy.requests_per_minute is not None:
                account.bucket("requests", policy.requests_per_minute, now).level -= len(requests)
            account.live += places
            return Ticket(self, tenant, places, now)

    def spent(self, tenant: str, tokens: int) -> None:
        """The tenant has used these tokens."""
        limit = self._policies().of(tenant).tokens_per_minute
        if limit is not None and tokens:
            with self._lock:
                self._account(tenant).bucket("tokens", limit, self._clock()).level -= tokens

    def on_step(self, step: StepRecord, token_latencies_s: list[float]) -> None:
        """Nothing: answers are paid at their end. As an observer of the engine, on its thread."""

    def on_finish(self, request: RequestRecord) -> None:
        """A request has ended: its answer is paid."""
        self.spent(request.tenant, request.output_tokens)

    def headers(self, tenant: str) -> dict[str, str]:
        """``x-ratelimit-*`` as OpenAI's API has them, of the limits that the tenant has."""
        policy = self._policies().of(tenant)
        found: dict[str, str] = {}
        with self._lock:
            now = self._clock()
            for name, limit in _limits(policy).items():
                bucket = self._account(tenant).bucket(name, limit, now)
                found[f"x-ratelimit-limit-{name}"] = str(limit)
                found[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                found[f"x-ratelimit-reset-{name}"] = span(bucket.wait(limit))
        return found

    def _account(self, tenant: str) -> _Account:
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account()
            self._forget()
        self._accounts.move_to_end(tenant)
        return account

    def _forget(self) -> None:
        while len(self._accounts) > MAX_TENANTS:
            idle = next((name for name, account in self._accounts.items() if not account.live), None)
            if idle is None:
                return
            del self._accounts[idle]

    def _check(self, tenant: str, policy: TenantPolicy, requests: int, places: int, now: float) -> None:
        account = self._account(tenant)
        for name, limit in _limits(policy).items():
            bucket = account.bucket(name, limit, now)
            wait = bucket.wait(requests if name == "requests" else 1)
            if wait > 0:
                whole = bucket.wait(limit)
                text = f"has used its {limit} {_WORDS[name]}: {span(wait)} until it may ask again, {span(whole)} until "
                self._refuse(tenant, name, text + "all is back", wait, whole)
        places_limit = policy.concurrent_requests
        if places_limit is not None and account.live + places > places_limit:
            wait = min(max(account.call_s / max(account.live, 1), FIRST_WAIT_S), LONGEST_WAIT_S)
            self._refuse(
                tenant, "concurrent", f"has {account.live} requests at once, and may have {places_limit}", wait, wait
            )

    def _refuse(self, tenant: str, quota: str, what: str, wait: float, reset: float) -> None:
        self.on_refusal(tenant, quota)
        self.num_refused[quota] += 1
        raise QuotaExceeded(f"tenant {tenant or '-'} {what}", quota, wait, reset)

    def _left(self, tenant: str, places: int, started: float) -> None:
        with self._lock:
            account = self._account(tenant)
            account.live -= places
            account.call_s += 0.2 * (max(0.0, self._clock() - started) - account.call_s)


def _limits(policy: TenantPolicy) -> dict[str, int]:
    both = {"requests": policy.requests_per_minute, "tokens": policy.tokens_per_minute}
    return {name: limit for name, limit in both.items() if limit is not None}


def allowed_priority(policies: Policies, policy: TenantPolicy, tenant: str, priority: int) -> int:
    """The priority that a request gets. 0, which is also none, stands for the tenant's first class.

    Raises:
        InvalidRequest: it is of no class that the tenant may have.
    """
    if policy.priority_classes is None:
        return priority
    numbers = {policies.classes[name]: name for name in policy.priority_classes}
    if priority in numbers:
        return priority
    if priority == 0:
        return next(iter(numbers))
    allowed = ", ".join(f"{number} ({name})" for number, name in numbers.items())
    raise InvalidRequest("priority", priority, f"{allowed} for tenant {tenant!r}")


def span(seconds: float) -> str:
    """As OpenAI writes the time until a reset: ``120ms``, ``1.5s``, ``6m0s``."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{round(rest, 1):g}s"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes the present call. ``tenant`` is empty for nobody in particular.

    ``tied``: the credential belongs to this tenant, and shows no other's figures.
    """

    tenant: str
    governor: Governor
    tied: bool = False


#: Of the present call; None where no transport has asked.
current_caller: ContextVar[Caller | None] = ContextVar("carousel_caller", default=None)


def tied_tenant() -> str | None:
    """The tenant whose credential the present call shows, who may see its own figures only; None: all may be seen."""
    caller = current_caller.get()
    return caller.tenant if caller is not None and caller.tied else None


def priority_numbers(caller: Caller | None) -> Mapping[str, int]:
    """Names that the header of a priority may have."""
    found: Mapping[str, Any] = caller.governor.policies.classes if caller is not None else {}
    return found
