"""Who may talk to the server, and how: API keys and TLS together, read before anything is opened."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carousel.auth import ApiKeys, KeysUnreadable
from carousel.tls import Tls
from carousel.watch import RELOAD_SECONDS

if TYPE_CHECKING:
    from carousel.config import Settings


@dataclass(frozen=True, slots=True)
class Security:
    """``keys`` None: everybody may ask. ``tls`` None: in the clear."""

    keys: ApiKeys | None = None
    tls: Tls | None = None

    @classmethod
    def from_settings(cls, settings: Settings) -> Security:
        """Read keys and certificates.

        Raises:
            KeysUnreadable: the keys are no good.
            TlsUnusable: the certificates are no good.
        """
        try:
            keys = ApiKeys(Path(settings.api_keys)) if settings.api_keys else None
        except KeysUnreadable as error:
            raise KeysUnreadable(f"--api-keys {error}") from None
        return cls(keys, Tls.from_settings(settings))

    def uvicorn_options(self) -> dict[str, Any]:
        """Arguments for ``uvicorn.Config``."""
        tls = self.tls
        return {} if tls is None else {"ssl_context_factory": lambda config, default: tls.context}

    def grpc_credentials(self) -> Any:
        """``grpc.ServerCredentials``, or None."""
        return None if self.tls is None else self.tls.grpc_credentials()

    async def follow(self) -> None:
        """Take changed certificates in use, until cancelled. Keys look for themselves, when one is shown."""
        while self.tls is not None:
            await asyncio.sleep(RELOAD_SECONDS)
            self.tls.refresh()
