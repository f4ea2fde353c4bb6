"""API keys: who may ask, and for whom the tokens are counted.

Keys stand in a file, or in the files of a directory such as a mounted secret, one a line. ``#`` begins a comment line.
``KEY=TENANT`` ties a key to a tenant: whatever tenant its user claims to be, the requests count for that one. Files are
read again when they change. Only SHA-256 digests of the keys are kept, and every check compares with all of them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from carousel.protocols.errors import AuthenticationFailed
from carousel.watch import RELOAD_SECONDS, FileWatch, expand

logger = logging.getLogger("carousel.auth")

TENANT_HEADER = "x-carousel-tenant"
MAX_FILE_BYTES = 2**20
KEY_LENGTHS = (8, 512)

_LINE = re.compile(r"([!-~]+?)(?:=([A-Za-z0-9][A-Za-z0-9._-]{0,127}))?")
_ALLOWED = (
    f"a key of {KEY_LENGTHS[0]} to {KEY_LENGTHS[1]} visible ASCII characters, or KEY=TENANT with a tenant of letters, "
    "digits, dots, dashes and underscores"
)
# Machines that poll these have no keys: probes, scrapers, load balancers. The live page's files hold nobody's data.
_OPEN_ROUTE = re.compile(
    r"/|/livez|/readyz|/startupz|/healthz|/health|/load|/metrics|/v2/health/(?:live|ready)"
    r"|/v2/models/[^/]+(?:/versions/[^/]+)?/ready|/page/[a-z-]+\.(?:css|js|svg)"
)
_OPEN_METHODS = frozenset({"ServerLive", "ServerReady", "ModelReady"})


class KeysUnreadable(Exception):
    """The keys cannot be read. The message names the file, the line and what is allowed, and never a key."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a valid key gives. ``tenant`` is None for a key that is tied to none."""

    tenant: str | None


def is_open_route(method: str, path: str) -> bool:
    """Whether an HTTP request needs no key: health and metrics."""
    return method in ("GET", "HEAD") and _OPEN_ROUTE.fullmatch(path) is not None


def is_open_method(method: str) -> bool:
    """Whether a gRPC call (``/package.Service/Method``) needs no key: health."""
    service, _, name = method.strip("/").partition("/")
    return service == "grpc.health.v1.Health" or (service == "inference.GRPCInferenceService" and name in _OPEN_METHODS)


def read_keys(path: Path) -> dict[bytes, Grant]:
    """The keys of a file or directory: SHA-256 digest of a key -> what it gives.

    Raises:
        KeysUnreadable: a file is not there, too large, no text, or has a line that is no key.
    """
    keys: dict[bytes, Grant] = {}
    try:
        files = expand(path)
        for file in files:
            with file.open("rb") as opened:
                raw = opened.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                raise KeysUnreadable(f"{file}: larger than {MAX_FILE_BYTES} bytes, which no list of keys is")
            _read_lines(file, raw, keys)
    except OSError as error:
        raise KeysUnreadable(f"{error.filename or path}: {error.strerror}") from None
    return keys


def _read_lines(file: Path, raw: bytes, keys: dict[bytes, Grant]) -> None:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise KeysUnreadable(f"{file}: it is no UTF-8 text") from None
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or not KEY_LENGTHS[0] <= len(match[1]) <= KEY_LENGTHS[1]:
            raise KeysUnreadable(f"{file}, line {number}: not a key; allowed: {_ALLOWED}")
        digest, grant = _digest(match[1]), Grant(match[2])
        if keys.setdefault(digest, grant) != grant:
            raise KeysUnreadable(f"{file}, line {number}: this key is there already, with another tenant")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def presented_keys(headers: Mapping[str, str]) -> list[str]:
    """The keys that a request shows, from ``Authorization: Bearer`` and ``x-api-key`` (lower-case names)."""
    found = []
    scheme, _, value = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        found.append(value.strip())
    if value := headers.get("x-api-key", "").strip():
        found.append(value)
    return found


class ApiKeys:
    """The keys in force, read again when their files change.

    Files that cannot be read leave the keys as they were, with an error in the log; files that are read and hold no
    key let nobody in.

    Args:
        path: a file or a directory.
        clock: seconds, monotonic.

    Raises:
        KeysUnreadable: at the start; also when there is no key at all.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._watch = FileWatch([path])
        self._keys = read_keys(path)
        if not self._keys:
            raise KeysUnreadable(f"{path}: there is no key in it; one a line: {_ALLOWED}")
        self._looked = clock()
        logger.info("API keys are required: %d from %s", len(self._keys), path)

    def __len__(self) -> int:
        return len(self._keys)

    def check(self, headers: Mapping[str, str]) -> Grant:
        """What the key in ``headers`` (lower-case names) gives.

        Raises:
            AuthenticationFailed: there is none, or it is not ours.
        """
        self._refresh()
        keys = presented_keys(headers)
        if not keys:
            raise AuthenticationFailed("an API key is required: send Authorization: Bearer KEY, or x-api-key: KEY")
        grant = self._find(keys)
        if grant is None:
            raise AuthenticationFailed("the API key is not valid")
        return grant

    def _find(self, keys: Iterable[str]) -> Grant | None:
        found: Grant | None = None
        for key in keys:
            digest = _digest(key)
            # All of them, always: how long it takes must not say which one matched, or how nearly.
            for known, grant in self._keys.items():
                if hmac.compare_digest(known, digest) and found is None:
                    found = grant
        return found

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked < RELOAD_SECONDS:
            return
        self._looked = now
        if not self._watch.changed():
            return
        try:
            self._keys = read_keys(self.path)
        except KeysUnreadable as error:
            logger.error("the API keys changed and cannot be read; those of before stay in force: %s", error)
            return
        level = logging.INFO if self._keys else logging.WARNING
        logger.log(level, "the API keys changed: %d from %s", len(self._keys), self.path)
