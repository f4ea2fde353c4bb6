"""The page's files, read once, and the headers that keep it to itself: it loads nothing from anywhere else."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked again each time; the answer is 304 while nothing changed
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    media_type: str
    etag: str


def load() -> dict[str, Asset]:
    """File name -> file, of everything that belongs to the page."""
    found = {}
    for entry in (resources.files("carousel.page") / "static").iterdir():
        kind = "." + entry.name.rpartition(".")[2]
        if kind in _TYPES:
            body = entry.read_bytes()
            found[entry.name] = Asset(body, _TYPES[kind], f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return found
