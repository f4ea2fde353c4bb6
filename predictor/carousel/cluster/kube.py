"""The few calls of Kubernetes' API that are needed, over aiohttp: pods, and reviews of tokens.

Why not the ``kubernetes`` package, which KServe brings along: it is synchronous (a watch and every call would hold a
thread), takes 126 MB of disk, and importing client, config and watch with two of its classes costs 0.45 s of CPU and
54 MB of memory (aiohttp, which this distribution needs anyway: 0.13 s, 23 MB), for few calls whose wire format does
not change: list, watch and patch of pods, review of tokens.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import aiohttp

from carousel.addresses import url_host

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_SECONDS = 60
"""How long one watch lasts: a connection that died unnoticed is found out after this."""

_ANSWER_SECONDS = 10.0
_MAX_SHOWN = 200


class KubeError(Exception):
    """A call failed. The message says which, why, and what to do where that is known."""


class KubeForbidden(KubeError):
    """401 or 403: the token is not accepted, or its account may not do this."""


class KubeGone(KubeError):
    """410: the version to watch from has been forgotten; list again."""


class KubeMissing(KubeError):
    """404: there is no such object, or no such API."""


class KubeUnreachable(KubeError):
    """No answer, or none that makes sense."""


class KubeApi:
    """A client for pods of one namespace.

    Args:
        base_url: of the API server, without a path.
        namespace: of the pods.
        token_file: bearer token, read at each call because kubelet renews it; None: no token.
        ca_file: authorities of the server's certificate (PEM); None: the system's.
        timeout_s: seconds for an answer.
    """

    def __init__(
        self,
        base_url: str,
        namespace: str,
        token_file: Path | None = None,
        ca_file: Path | None = None,
        timeout_s: float = _ANSWER_SECONDS,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.namespace = namespace
        self._token_file = token_file
        self._ca_file = ca_file
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    @classmethod
    def in_cluster(cls, namespace: str = "", api_server: str = "", account: Path = SERVICE_ACCOUNT) -> KubeApi:
        """The API of the cluster that this pod runs in, by its service account.

        Args:
            namespace: of the pods; empty: the account's own.
            api_server: another address than ``KUBERNETES_SERVICE_HOST``; asked without a token when it is plain HTTP.
            account: where the token is mounted.

        Raises:
            KubeUnreachable: this is no pod, or it has no token.
        """
        token, ca = account / "token", account / "ca.crt"
        if not namespace:
            try:
                namespace = (account / "namespace").read_text("utf-8").strip()
            except OSError:
                raise KubeUnreachable(
                    f"no namespace: none was given, and {account}/namespace does not exist; is this a pod with "
                    "automountServiceAccountToken: true?"
                ) from None
        if api_server.startswith("http://"):
            return cls(api_server, namespace)
        host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
        port = os.environ.get("KUBERNETES_SERVICE_PORT_HTTPS") or os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not api_server and not host:
            raise KubeUnreachable("KUBERNETES_SERVICE_HOST is not set: this does not run in a Kubernetes cluster")
        if not token.exists():
            raise KubeUnreachable(
                f"{token} does not exist: the pod has no service account token (automountServiceAccountToken: true, "
                "and a serviceAccountName with the Role)"
            )
        return cls(api_server or f"https://{url_host(host)}:{port}", namespace, token, ca if ca.exists() else None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _connected(self) -> aiohttp.ClientSession:
        if self._session is None:
            context = True if self._ca_file is None else ssl.create_default_context(cafile=str(self._ca_file))
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context), trust_env=False)
        return self._session

    def _headers(self, what: str) -> dict[str, str]:
        if self._token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self._token_file.read_text('utf-8').strip()}"}
        except OSError as error:
            raise KubeUnreachable(f"{what}: {self._token_file} cannot be read: {error.strerror}") from None

    async def patch_pod(self, name: str, annotations: dict[str, str]) -> None:
        """Set annotations of a pod (verb ``patch`` on ``pods``).

        Raises:
            KubeError: it was refused, or could not be asked for.
        """
        what = f"patch of pod {self.namespace}/{name}"
        body = json.dumps({"metadata": {"annotations": annotations}}).encode()
        headers = {"Content-Type": "application/merge-patch+json"}
        await self._answer("PATCH", f"{self._pods()}/{quote(name, safe='')}", what, body=body, headers=headers)

    async def list_pods(self, selector: str) -> tuple[list[dict[str, Any]], str]:
        """Pods with these labels and the version of the list, to watch from (verb ``list`` on ``pods``).

        Raises:
            KubeError: it was refused, or could not be asked for.
        """
        what = f"list of pods {selector} in {self.namespace}"
        # Version 0: from the API server's cache. Many scalers listing again after an outage cost etcd nothing.
        found = await self._answer("GET", self._pods(), what, {"labelSelector": selector, "resourceVersion": "0"})
        items, version = found.get("items") or [], found.get("metadata", {}).get("resourceVersion", "")
        return [item for item in items if isinstance(item, dict)], str(version)

    async def watch_pods(self, selector: str, version: str) -> AsyncIterator[dict[str, Any]]:
        """Events ``{"type": ..., "object": ...}`` after ``version``, until the server ends the watch (verb ``watch``).

        The first event is an empty one, when the server has accepted the watch.

        Raises:
            KubeGone: the version is too old: list again.
            KubeError: it was refused, or broke.
        """
        what = f"watch of pods {selector} in {self.namespace}"
        query = {
            "labelSelector": selector,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._timeout_s, sock_read=WATCH_SECONDS + 15.0)
        try:
            request = self._connected().get(
                self.base_url + self._pods(), params=query, headers=self._headers(what), timeout=timeout
            )
            async with asyncio.timeout(self._timeout_s):
                response = await request
            async with response:
                if response.status != 200:
                    raise _refusal(response.status, await response.text(), what)
                yield {}
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line.strip():
                            yield _event(line, what)
                if rest.strip():
                    raise KubeUnreachable(f"{what}: it ended in the middle of an event ({self.base_url})")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubeUnreachable(f"{what}: {_reason(error)} ({self.base_url})") from error

    async def review_token(self, token: str, audiences: Sequence[str]) -> dict[str, Any]:
        """What the API server says of a token: ``authenticated``, ``user``, ``audiences`` (verb ``create`` on
        ``tokenreviews``, which the ClusterRole ``system:auth-delegator`` allows).

        Raises:
            KubeError: it was refused, or could not be asked for.
        """
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": list(audiences)},
        }
        path = "/apis/authentication.k8s.io/v1/tokenreviews"
        headers = {"Content-Type": "application/json"}
        found = await self._answer("POST", path, "review of a token", body=json.dumps(review).encode(), headers=headers)
        status = found.get("status")
        return status if isinstance(status, dict) else {}

    def _pods(self) -> str:
        return f"/api/v1/namespaces/{quote(self.namespace, safe='')}/pods"

    async def _answer(
        self,
        method: str,
        path: str,
        what: str,
        query: dict[str, str] | None = None,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        sent = {**self._headers(what), **(headers or {})}
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        try:
            request = self._connected().request(
                method, self.base_url + path, params=query, data=body, headers=sent, timeout=timeout
            )
            async with request as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubeUnreachable(f"{what}: {_reason(error)} ({self.base_url})") from error
        if response.status >= 300:
            raise _refusal(response.status, text, what)
        return _object(text, what)


def _reason(error: BaseException) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__


def _object(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise KubeUnreachable(f"{what}: the answer is no JSON object")
    return found


def _event(line: bytes, what: str) -> dict[str, Any]:
    event = _object(line, what)
    if event.get("type") == "ERROR":
        status = event.get("object") or {}
        raise _refusal(int(status.get("code") or 500), json.dumps(status), what)
    return event


def _refusal(status: int, text: str, what: str) -> KubeError:
    try:
        message = str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        message = text.strip()
    shown = f"{what}: HTTP {status}: {message[:_MAX_SHOWN]}"
    if status in (401, 403):
        return KubeForbidden(shown)
    kinds: dict[int, type[KubeError]] = {404: KubeMissing, 410: KubeGone}
    return kinds.get(status, KubeUnreachable)(shown)


class Complaint:
    """Says once that something does not work, and once that it works again; in between only how long to wait.

    Args:
        logger: told at level error, then info.
        what: that does not work, as the line begins.
        first_s: seconds of the first pause; each one in a row is twice as long.
        longest_s: seconds of the longest.
    """

    def __init__(self, logger: logging.Logger, what: str, first_s: float = 1.0, longest_s: float = 60.0) -> None:
        self._logger = logger
        self._what = what
        self._first_s = first_s
        self._longest_s = longest_s
        self._failures = 0
        self.problem: str | None = None

    def failed(self, error: BaseException, hint: str = "") -> float:
        """Note a failure. Returns seconds to wait before the next try, with a jitter of a quarter."""
        if self.problem is None:
            self._logger.error("%s: %s%s", self._what, error, f"; {hint}" if hint else "")
        else:
            self._logger.debug("%s, still: %s", self._what, error)
        self.problem = str(error)
        pause = min(self._first_s * 2.0**self._failures, self._longest_s)
        self._failures = min(self._failures + 1, 30)
        return pause * random.uniform(0.75, 1.25)

    def worked(self) -> None:
        """Note a success."""
        if self.problem is not None:
            self._logger.info("%s: works again", self._what)
        self.problem = None
        self._failures = 0


async def pause(seconds: float, ended: asyncio.Event) -> bool:
    """Sleep, at most until ``ended`` is set. Returns whether it is."""
    try:
        async with asyncio.timeout(seconds):
            await ended.wait()
    except TimeoutError:
        return False
    return True
