"""The soak's clients over HTTP: one that reads answers, and one that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import time
from typing import Any

import aiohttp

from .outcome import Seen
from .plan import STREAMS, Plan, body_of, path_of

_CONNECTION = (aiohttp.ClientError, ConnectionError, TimeoutError, asyncio.IncompleteReadError)
_GUARD_EXTRA_S = 5.0


def request_of(plan: Plan, model: str) -> tuple[str, str, bytes, dict[str, str]]:
    """Method, path, body and headers."""
    headers = dict(plan.headers)
    if plan.bad is not None:
        headers |= {"Content-Type": plan.bad.content_type} | dict(plan.bad.headers)
        return plan.bad.method, plan.bad.path, plan.bad.body, headers
    headers["Content-Type"] = "application/json"
    return "POST", path_of(plan.protocol, model), json.dumps(body_of(plan, model)).encode(), headers


def error_text(raw: bytes) -> str | None:
    """The message of an error body of any of the protocols; None when it has none."""
    try:
        error = json.loads(raw)["error"]
    except (ValueError, KeyError, TypeError):
        return None
    return str(error["message"]) if isinstance(error, dict) else str(error)


def read_whole(plan: Plan, body: dict[str, Any], seen: Seen) -> None:
    """Take an unstreamed answer in."""
    seen.ended = True
    if plan.protocol == "v1":
        answer = body["predictions"][0]
        seen.text, seen.reason, seen.tokens = (
            answer["text"],
            answer["finish_reason"],
            answer["usage"]["completion_tokens"],
        )
    elif plan.protocol == "v2":
        columns = {column["name"]: column["data"][0] for column in body["outputs"]}
        seen.text, seen.reason = columns["text_output"], columns["finish_reason"]
        seen.tokens = columns["completion_tokens"]
    elif plan.protocol == "generate":
        seen.text = body["text_output"]
        details = body.get("details")
        seen.reason = details["finish_reason"] if details else "stop"
    else:
        choice = body["choices"][0]
        seen.text = choice["message"]["content"] if plan.protocol == "chat" else choice["text"]
        seen.reason, seen.tokens = choice["finish_reason"], body["usage"]["completion_tokens"]


def read_event(plan: Plan, data: bytes, seen: Seen) -> None:
    """Take one server-sent event in."""
    if data == b"[DONE]":
        seen.ended = True
        return
    event = json.loads(data)
    if "error" in event:
        seen.error = error_text(data)
        return
    if plan.protocol == "generate_stream":
        seen.text += event["text_output"]
        reason = (event.get("details") or {}).get("finish_reason")
        if reason:
            seen.reason, seen.ended = reason, True
        return
    for choice in event["choices"]:
        seen.text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        seen.reason = choice["finish_reason"] or seen.reason
    if event.get("usage"):
        seen.tokens = event["usage"]["completion_tokens"]


class HttpClient:
    """Reads answers to their end. ``guard_s``: an answer that takes longer is a hang."""

    def __init__(self, address: tuple[str, int], model: str, guard_s: float) -> None:
        self.address, self.model, self.guard_s = address, model, guard_s
        self.url = f"http://{address[0]}:{address[1]}"
        self.session = self._open()

    def _open(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=self.guard_s)
        return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    async def close(self) -> None:
        await self.session.close()

    async def reconnect(self) -> None:
        """Close the kept connections, of which nobody uses any: an idle server shall have no clients."""
        await self.session.close()
        self.session = self._open()

    async def call(self, plan: Plan, seen: Seen) -> None:
        """Send a request and take its answer in."""
        method, path, body, headers = request_of(plan, self.model)
        started = time.perf_counter()
        try:
            async with self.session.request(method, self.url + path, data=body, headers=headers) as response:
                seen.status = response.status
                seen.retry_after = response.headers.get("Retry-After")
                if response.status != 200:
                    seen.error = error_text(await response.read())
                elif plan.protocol in STREAMS:
                    async for line in response.content:
                        if line.startswith(b"data: "):
                            if seen.first_s is None:
                                seen.first_s = time.perf_counter() - started
                            read_event(plan, line[6:].strip(), seen)
                else:
                    read_whole(plan, json.loads(await response.read()), seen)
        except _CONNECTION as error:
            seen.broken = f"{type(error).__name__}: {error}"
        except (ValueError, KeyError, IndexError, TypeError) as error:
            seen.broken = f"an answer that cannot be read: {type(error).__name__}: {error}"

    async def leave(self, plan: Plan, seen: Seen) -> None:
        """Send a request, or half of it, and go away as ``plan.leave`` says; what came before that is kept."""
        assert plan.leave is not None
        method, path, body, headers = request_of(plan, self.model)
        head = f"{method} {path} HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(body)}\r\n"
        head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
        received = bytearray()
        try:
            reader, writer = await asyncio.open_connection(*self.address)
        except OSError as error:
            seen.broken = f"{type(error).__name__}: {error}"
            return
        try:
            writer.write(head.encode() + (body[: len(body) // 2] if plan.leave.where == "sending" else body))
            await writer.drain()
            if plan.leave.where == "reading":
                await asyncio.wait_for(_read_some(reader, received), self.guard_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(plan.leave.after_s):
                    while await _read_some(reader, received):
                        pass
        except _CONNECTION as error:
            seen.broken = f"{type(error).__name__}: {error}"
        finally:
            seen.left = True
            _part(writer, reset=plan.leave.reset)
        read_received(plan, bytes(received), seen)


async def _read_some(reader: asyncio.StreamReader, received: bytearray) -> bool:
    chunk = await reader.read(65536)
    received += chunk
    return bool(chunk)


def _part(writer: asyncio.StreamWriter, *, reset: bool) -> None:
    if reset:
        connection = writer.get_extra_info("socket")
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    else:
        writer.close()


def read_received(plan: Plan, received: bytes, seen: Seen) -> None:
    """What a client that left had got of a raw HTTP/1.1 response by then."""
    head, _, rest = received.partition(b"\r\n\r\n")
    if not rest and b"\r\n\r\n" not in received:
        return
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    seen.status, seen.retry_after = int(first.split()[1]), headers.get("retry-after")
    if seen.status != 200:
        seen.error = error_text(rest) or "an error"
    elif plan.protocol in STREAMS:
        for line in rest.split(b"\n"):
            data = line.removeprefix(b"data: ").strip()
            if line.startswith(b"data: {") and data.endswith(b"}"):
                with contextlib.suppress(ValueError):  # cut off in the middle
                    read_event(plan, data, seen)
