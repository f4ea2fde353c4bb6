"""The one error of model resolution, and how a URI is shown in it."""

from __future__ import annotations

import re

_USER_INFO = re.compile(r"(?<=://)[^/@?#]*@(?=[^/?#])")
_QUERY = re.compile(r"\?[^#]*")


def shown(uri: str) -> str:
    """The URI as messages and cache files may show it: without user info or query, which can hold secrets."""
    scheme = uri.partition("://")[0].lower()
    if scheme in {"http", "https"}:
        uri = _QUERY.sub("?...", _USER_INFO.sub("", uri), count=1)
    return uri


class SourceError(RuntimeError):
    """A model cannot be had from its URI.

    Args:
        uri: what was asked for; shown without credentials.
        cause: what went wrong, as a phrase.
        hint: what the user can try, as a sentence.
    """

    def __init__(self, uri: str, cause: str, hint: str) -> None:
        self.uri = shown(uri)
        self.cause = cause.rstrip(".")
        self.hint = hint
        super().__init__(f"cannot get the model {self.uri}: {self.cause}. {self.hint}")
