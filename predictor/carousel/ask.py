"""Asking a running server, for commands that look at one."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carousel.engine.errors import CarouselError
from carousel.options import NUMBER, TEXT, option

KEY_VARIABLE = "CAROUSEL_API_KEY"
_SHOWN = 300


class ServerSilent(CarouselError):
    """The server did not answer, or not what was asked. The message says which and why."""


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How a server is asked."""

    api_key_file: str = option(
        "", TEXT, f"File whose first line is the API key; without it, the variable {KEY_VARIABLE}.", group="Server",
        empty="no key", allowed="a file", env=False,
    )  # fmt: skip
    ca_file: str = option(
        "", TEXT, "Authorities (PEM) of the server's certificate.", group="Server",
        empty="the system's", allowed="a file", env=False,
    )  # fmt: skip
    answer_seconds: float = option(
        10.0, NUMBER, "How long an answer may take.", unit="seconds", group="Server", low=0.1, high=600, env=False
    )


def ask(base: str, path: str, client: ClientOptions, environ: Mapping[str, str] = os.environ) -> str:
    """The text that ``GET base + path`` answers.

    Raises:
        ServerSilent: there is no answer, or another status than 200.
    """
    url = base.rstrip("/") + path
    try:
        key = environ.get(KEY_VARIABLE, "")
        if client.api_key_file:
            key = (Path(client.api_key_file).read_text("utf-8").splitlines() or [""])[0].strip()
        context = ssl.create_default_context(cafile=client.ca_file or None) if url.startswith("https:") else None
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(request, timeout=client.answer_seconds, context=context) as answer:
            text: str = answer.read().decode("utf-8", "replace")
            return text
    except urllib.error.HTTPError as error:
        said = error.read(_SHOWN).decode("utf-8", "replace").strip()
        hint = f"; set {KEY_VARIABLE} or --api-key-file" if error.code == 401 else ""
        raise ServerSilent(f"{url}: HTTP {error.code}: {said}{hint}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ServerSilent(f"{url}: {reason}") from None


def ask_json(base: str, path: str, client: ClientOptions, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The JSON object that ``GET base + path`` answers.

    Raises:
        ServerSilent: there is no answer, or it is something else.
    """
    try:
        found = json.loads(ask(base, path, client, environ))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ServerSilent(f"{base.rstrip('/')}{path}: the answer is no JSON object; is this a Carousel server?")
    return found
