"""Who may talk to the server, and how: credentials, tenants' policy and TLS, read before anything is opened."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carousel.auth import ApiKeys, KeysUnreadable
from carousel.tenancy.identity import AccountIdentity, Door, HeaderIdentity, IdentitySource, KeyIdentity
from carousel.tenancy.policy import PolicyFile, PolicyUnreadable
from carousel.tenancy.quota import Governor
from carousel.tls import Tls
from carousel.watch import RELOAD_SECONDS

if TYPE_CHECKING:
    from carousel.config import Settings


class CredentialsUnusable(Exception):
    """A setting of the server's security cannot be used. The message names it and says why."""


@dataclass(frozen=True, slots=True)
class Security:
    """``door`` says who calls, by ``policies``. ``tls`` None: in the clear."""

    policies: PolicyFile = field(default_factory=lambda: PolicyFile(None))
    door: Door | None = None
    tls: Tls | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Security:
        """Read keys, policy and certificates.

        Raises:
            CredentialsUnusable: keys, policy or service account are no good.
            TlsUnusable: the certificates are no good.
        """
        try:
            policies = PolicyFile(Path(settings.tenant_policy) if settings.tenant_policy else None)
            sources = _sources(settings, policies)
        except KeysUnreadable as error:
            raise CredentialsUnusable(f"--api-keys {error}") from None
        except PolicyUnreadable as error:
            raise CredentialsUnusable(f"--tenant-policy {error}") from None
        header = HeaderIdentity() if settings.trust_tenant_header else None
        door = Door(Governor(lambda: policies.current), sources, header)
        return cls(policies, door, Tls.from_settings(settings))

    def uvicorn_options(self) -> dict[str, Any]:
        """Arguments for ``uvicorn.Config``."""
        tls = self.tls
        return {} if tls is None else {"ssl_context_factory": lambda config, default: tls.context}

    def grpc_credentials(self) -> Any:
        """``grpc.ServerCredentials``, or None."""
        return None if self.tls is None else self.tls.grpc_credentials()

    async def follow(self) -> None:
        """Take changed certificates and policies, until cancelled. Keys look for themselves, when one is shown."""
        while self.tls is not None or self.policies.path is not None:
            await asyncio.sleep(RELOAD_SECONDS)
            self.policies.refresh()
            if self.tls is not None:
                self.tls.refresh()


def _sources(settings: Settings, policies: PolicyFile) -> list[IdentitySource]:
    sources: list[IdentitySource] = []
    if settings.api_keys:
        sources.append(KeyIdentity(ApiKeys(Path(settings.api_keys))))
    if settings.service_account_audience:
        from carousel.cluster.kube import KubeApi, KubeError  # aiohttp: only where it is wanted

        try:
            api = KubeApi.in_cluster(namespace="default")  # reviews belong to no namespace
        except KubeError as error:
            raise CredentialsUnusable(f"--service-account-audience: {error}") from None
        sources.append(AccountIdentity(api, settings.service_account_audience, lambda: policies.current))
    return sources
