"""Who asks: an API key, a Kubernetes service account token, or a header that a trusted gateway sets.

Service account tokens are reviewed by the API server (``TokenReview``) and not checked here against the cluster's
public keys: a review knows of accounts, pods and nodes that are gone, which a signature does not, it needs no library
for signatures, and the server asks once a minute for each token, not once for each request.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from carousel.auth import TENANT_HEADER, ApiKeys, presented_keys
from carousel.engine.errors import EngineUnavailable, InvalidRequest
from carousel.protocols.errors import AuthenticationFailed
from carousel.tenancy.policy import Policies
from carousel.tenancy.quota import Caller, Governor

logger = logging.getLogger("carousel.tenants")

GOOD_SECONDS = 60.0
"""How long a review that was good is believed; a token that ends earlier is not believed longer."""

BAD_SECONDS = 10.0
MAX_REMEMBERED = 4096
MAX_TOKEN = 16 * 2**10
MAX_REVIEWS = 8
"""Reviews at a time: a flood of made-up tokens must not become one of the API server."""

_ACCOUNT_PREFIX = "system:serviceaccount:"


@dataclass(frozen=True, slots=True)
class Identity:
    """What a credential says. ``tenant`` is None for one that is tied to none."""

    tenant: str | None


class IdentitySource(Protocol):
    """One way to say who asks."""

    async def identify(self, headers: Mapping[str, str]) -> Identity | None:
        """Whom the headers (lower-case names) show; None: nobody that this source knows.

        Raises:
            CarouselError: it cannot be found out now.
        """

    async def close(self) -> None:
        """Nobody will be asked about any more."""


class KeyIdentity:
    """API keys, of which each may be tied to a tenant."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def identify(self, headers: Mapping[str, str]) -> Identity | None:
        try:
            return Identity(self._keys.check(headers).tenant)
        except AuthenticationFailed:
            return None

    async def close(self) -> None:
        """Nothing: it holds nothing open."""


class HeaderIdentity:
    """``x-carousel-tenant``. Believed as it stands: only for servers behind a gateway that sets it."""

    async def identify(self, headers: Mapping[str, str]) -> Identity | None:
        tenant = headers.get(TENANT_HEADER)
        if tenant is None:
            return None
        if len(tenant) > 128 or not tenant.isprintable():
            raise InvalidRequest(TENANT_HEADER, tenant, "at most 128 printable characters")
        return Identity(tenant)

    async def close(self) -> None:
        """Nothing: it holds nothing open."""


class TokenReviewer(Protocol):
    """What is needed of Kubernetes' API; ``cluster.kube.KubeApi`` has it."""

    async def review_token(self, token: str, audiences: Sequence[str]) -> dict[str, Any]:
        """The ``status`` of a ``TokenReview``."""

    async def close(self) -> None:
        """Close its connections."""


class AccountIdentity:
    """Service account tokens (``Authorization: Bearer``).

    The tenant is the one of the policy that lists the account, else ``ns.NAMESPACE``.

    Args:
        reviewer: Kubernetes' API.
        audience: that the tokens must be meant for.
        policies: those in force.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        reviewer: TokenReviewer,
        audience: str,
        policies: Callable[[], Policies],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._reviewer, self._audience, self._policies, self._clock = reviewer, audience, policies, clock
        self._known: OrderedDict[bytes, tuple[float, str | None]] = OrderedDict()
        self._reviews = asyncio.Semaphore(MAX_REVIEWS)

    async def identify(self, headers: Mapping[str, str]) -> Identity | None:
        for token in presented_keys(headers):
            claims = _claims(token)
            if claims is None or not str(claims.get("sub", "")).startswith(_ACCOUNT_PREFIX):
                continue
            account = await self._account(token, claims)
            if account is not None:
                namespace, _, name = account.partition(":")
                return Identity(self._policies().tenant_of_account(namespace, name) or f"ns.{namespace}")
        return None

    async def close(self) -> None:
        await self._reviewer.close()

    async def _account(self, token: str, claims: Mapping[str, Any]) -> str | None:
        """``NAMESPACE:NAME`` of a good token, None of a bad one."""
        digest = hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
        if (found := self._remembered(digest)) is not None:
            return found[1]
        async with self._reviews:
            if (found := self._remembered(digest)) is not None:  # somebody else has asked meanwhile
                return found[1]
            try:
                status = await self._reviewer.review_token(token, [self._audience])
            except Exception as error:
                # Whatever it is: nobody gets in, and the token is not bad either.
                logger.error("a service account token cannot be reviewed: %s", error)
                raise EngineUnavailable("service account tokens cannot be checked at the moment") from error
        account = self._reviewed(status)
        until = self._clock() + (BAD_SECONDS if account is None else GOOD_SECONDS)
        expires = claims.get("exp")
        if isinstance(expires, (int, float)):
            until = min(until, expires) if account is not None else until
        self._known[digest] = (until, account)
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)
        return account

    def _remembered(self, digest: bytes) -> tuple[float, str | None] | None:
        found = self._known.get(digest)
        if found is None or found[0] <= self._clock():
            return None
        return found

    def _reviewed(self, status: Mapping[str, Any]) -> str | None:
        # A server that does not know of audiences leaves them out, and has then not looked at ours.
        if status.get("authenticated") is not True or self._audience not in (status.get("audiences") or ()):
            return None
        user = str((status.get("user") or {}).get("username", ""))
        account = user.removeprefix(_ACCOUNT_PREFIX)
        return account if account != user and account.count(":") == 1 else None


def _claims(token: str) -> dict[str, Any] | None:
    """What a JWT says of itself, unchecked: only good for not asking about what is none."""
    parts = token.split(".")
    if len(parts) != 3 or len(token) > MAX_TOKEN:
        return None
    try:
        found = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (ValueError, binascii.Error):
        return None
    return found if isinstance(found, dict) else None


class Door:
    """Says of each call who makes it, on every transport.

    Args:
        governor: holds callers to their quotas.
        sources: of which one must know the caller, asked in order; none: everybody may ask.
        header: believed where the sources name no tenant; None: not at all.
    """

    def __init__(
        self, governor: Governor, sources: Sequence[IdentitySource] = (), header: HeaderIdentity | None = None
    ) -> None:
        self.governor = governor
        self._sources = tuple(sources)
        self._header = header

    async def admit(self, headers: Mapping[str, str]) -> Caller:
        """Who asks. ``headers`` have lower-case names.

        Raises:
            AuthenticationFailed: there is no credential, or none that is good.
            CarouselError: it cannot be found out, or a header is malformed.
        """
        identity: Identity | None = None
        for source in self._sources:
            identity = await source.identify(headers)
            if identity is not None:
                break
        else:
            if self._sources:
                raise AuthenticationFailed(_why(headers))
        if identity is not None and identity.tenant:
            return Caller(identity.tenant, self.governor, tied=True)
        claimed = await self._header.identify(headers) if self._header is not None else None
        return Caller((claimed.tenant if claimed else None) or "", self.governor)

    async def close(self) -> None:
        for source in self._sources:
            await source.close()


def _why(headers: Mapping[str, str]) -> str:
    if presented_keys(headers):
        return "the API key is not valid"
    return "an API key is required: send Authorization: Bearer KEY, or x-api-key: KEY"
