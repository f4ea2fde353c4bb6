"""TLS for HTTP and gRPC: certificates checked at the start, and read again when their files change."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from carousel.watch import FileWatch

if TYPE_CHECKING:
    from carousel.config import Settings

logger = logging.getLogger("carousel.tls")


class TlsUnusable(Exception):
    """The files do not make a TLS server. The message names flag and file, and what is wrong with it."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: a certificate chain, its key, and the authorities of clients (None: clients need no certificate)."""

    certificate: Path
    key: Path
    client_ca: Path | None

    @property
    def paths(self) -> list[Path]:
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]


class Tls:
    """The TLS identity of both servers.

    Certificate and key may be replaced while serving: connections made afterwards see the new ones. New client
    authorities are added over HTTP and exact over gRPC; to take one away over HTTP, restart: OpenSSL's store only
    grows.

    Args:
        files: PEM files.

    Raises:
        TlsUnusable: a file is missing, is no PEM, or certificate and key do not belong together.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._watch = FileWatch(files.paths)
        self.context = make_context(files)
        self._pem = read_pem(files)

    @classmethod
    def from_settings(cls, settings: Settings) -> Tls | None:
        """None where the settings ask for none.

        Raises:
            TlsUnusable: see the class.
        """
        if not settings.tls_certificate:
            return None
        client_ca = Path(settings.tls_client_ca) if settings.tls_client_ca else None
        return cls(TlsFiles(Path(settings.tls_certificate), Path(settings.tls_key), client_ca))

    def refresh(self) -> bool:
        """Take changed files in use; files that are no good are reported and the old ones stay. Whether any changed."""
        if not self._watch.changed():
            return False
        try:
            pem = read_pem(self.files)
            make_context(self.files)  # loading a bad pair into the live context would leave it with half of each
            self.context.load_cert_chain(self.files.certificate, self.files.key)
            if self.files.client_ca is not None:
                self.context.load_verify_locations(self.files.client_ca)
        except (TlsUnusable, OSError) as error:
            logger.error("the TLS files changed and cannot be used; those of before stay in use: %s", error)
            return False
        self._pem = pem
        logger.info("the TLS files changed: new connections see the new certificate")
        return True

    def grpc_credentials(self) -> Any:
        """``grpc.ServerCredentials`` that follow this object."""
        import grpc

        required = self.files.client_ca is not None
        shown = self._pem

        def configuration() -> Any:
            certificate, key, client_ca = self._pem
            return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=client_ca)

        def fetch() -> Any:
            nonlocal shown
            if shown is self._pem:
                return None  # nothing new
            shown = self._pem
            return configuration()

        return grpc.dynamic_ssl_server_credentials(configuration(), fetch, required)


def make_context(files: TlsFiles) -> ssl.SSLContext:
    """A server's context: TLS 1.2 or newer.

    Raises:
        TlsUnusable: see :class:`Tls`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for flag, path in (("--tls-certificate", files.certificate), ("--tls-key", files.key)):
        _check_pem(flag, path)
    try:
        context.load_cert_chain(files.certificate, files.key, password=_no_password)
    except _Encrypted:
        raise TlsUnusable(f"--tls-key {files.key}: it is encrypted; give a key without a passphrase") from None
    except ssl.SSLError as error:
        raise TlsUnusable(
            f"--tls-certificate {files.certificate}, --tls-key {files.key}: {error.reason or error}; wanted: a PEM "
            "certificate chain and the private key that belongs to it"
        ) from None
    if files.client_ca is not None:
        _check_pem("--tls-client-ca", files.client_ca)
        try:
            context.load_verify_locations(files.client_ca)
        except ssl.SSLError as error:
            raise TlsUnusable(f"--tls-client-ca {files.client_ca}: {error.reason or error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


class _Encrypted(Exception):
    pass


def _no_password() -> str:
    raise _Encrypted  # else OpenSSL would ask on the terminal


def _check_pem(flag: str, path: Path) -> None:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise TlsUnusable(f"{flag} {path}: {error.strerror}") from None
    if b"-----BEGIN " not in raw:
        raise TlsUnusable(f"{flag} {path}: not a PEM file (no -----BEGIN line)")


def read_pem(files: TlsFiles) -> tuple[bytes, bytes, bytes | None]:
    """Certificate chain, key and client authorities, as gRPC wants them.

    Raises:
        OSError: a file is gone.
    """
    client_ca = files.client_ca.read_bytes() if files.client_ca is not None else None
    return files.certificate.read_bytes(), files.key.read_bytes(), client_ca
