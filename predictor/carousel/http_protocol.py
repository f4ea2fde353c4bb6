"""uvicorn's HTTP/1.1 connection with bounds: nothing that a client sends, or fails to send or read, is held for ever.

uvicorn bounds only the idle time between two requests. A client that trickles a header or a body a byte at a time, that
sends headers without end, or that never reads its answer, would keep its connection and what belongs to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import logging
import socket
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from carousel.middleware import LAST_WRITE

logger = logging.getLogger("carousel.http")

MAX_HEADER_BYTES = 64 * 2**10
"""Of a request's target and headers together; the field's servers have 8 to 64 KiB."""

MAX_HEADERS = 256
_FRAMING = (b"content-length", b"transfer-encoding")
LEAVE_SECONDS = 2.0
"""By how much the connection outlives the body's time: the application answers 408 first, in its protocol's form."""


class _Refused(Exception):
    """The request's head is refused with ``status``."""

    def __init__(self, status: int, message: str) -> None:
        self.status, self.message = status, message


class GuardedProtocol(HttpToolsProtocol):
    """One connection.

    ``read_seconds``, an attribute of the class that :func:`guarded` makes, bounds three spans: from the connection, or
    from a request's first byte, to the end of its headers; from there to the end of its body; and how long a client may
    leave an answer unread that is ready to be sent.
    """

    read_seconds = 60.0

    def __init__(self, config: Config, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._silent_bytes = 0  # since the parser last made something of what came
        self._refused: _Refused | None = None
        self._replaying = False
        self._idle_since: float | None = None  # None while a request is read or answered

    # ---- time

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._head_timer = self.loop.call_later(self.read_seconds, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._body_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        # uvicorn forgets this one after a reset; the timer would hold the connection and its last request meanwhile.
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        super().on_message_begin()
        self._idle_since = None
        self.scope[LAST_WRITE] = self._last_write  # type: ignore[literal-required]
        self._head_bytes = 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.read_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if (
            self.flow.read_paused or not self._is_answered
        ):  # it comes behind another request: that one's time is its own
            self._head_timer = self.loop.call_later(self.read_seconds, self._head_is_late)
        elif not self.transport.is_closing():
            self._refuse(408, f"the request's headers did not arrive within {self.read_seconds:g} s")
            self._abort_later()

    def _body_is_late(self) -> None:
        self._body_timer = None
        if self.flow.read_paused:
            self._body_timer = self.loop.call_later(self.read_seconds, self._body_is_late)
        elif not self.transport.is_closing():
            self.transport.abort()

    def _abort_later(self) -> None:
        """Closing waits for the client to read what is left; a client that reads nothing is cut off."""
        self.transport.close()
        self._start_write_timer()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.read_seconds, self._write_is_late)

    def _write_is_late(self) -> None:
        self._write_timer = None
        logger.info("a client left its answer unread for %g s: connection closed", self.read_seconds)
        self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._start_write_timer()

    # ---- the end

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_answered:
            self._idle_since = self.loop.time()

    def close_if_idle(self, seconds: float) -> None:
        """Close, if for so long nothing has been read or answered."""
        if self._idle_since is not None and self.loop.time() - self._idle_since >= seconds:
            self.transport.close()

    @property
    def told(self) -> bool:
        """Whether the client knows that the connection ends: it is closing, or the answer that runs says so."""
        if self.transport.is_closing():
            return True
        return self._idle_since is None and self.cycle is not None and not self.cycle.keep_alive

    def _last_write(self) -> None:
        """Close behind what is written next, an answer whose headers did not say so because it began long before.

        The client must learn of it in the same instant as of the answer's end, or it might already send the connection
        its next request: so the kernel holds the write back until it can add the end of the stream to the segment.
        """
        self.cycle.keep_alive = False
        cork = getattr(socket, "TCP_CORK", None)  # Linux
        peer = self.transport.get_extra_info("socket")
        if cork is not None and peer is not None and not self.transport.is_closing():
            with contextlib.suppress(OSError, ValueError):  # no descriptor: the client has gone
                peer.setsockopt(socket.IPPROTO_TCP, cork, 1)

    # ---- size

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        # A header (or the trailer of a body) reaches no callback before its end.
        self._silent_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        if self.transport.is_closing():
            return
        if self._silent_bytes > MAX_HEADER_BYTES:
            self._refused = _Refused(431, f"the request's headers are larger than {MAX_HEADER_BYTES} bytes")
            self.send_400_response("")
        elif self._head_timer is None and self._is_idle:  # line breaks between two requests: the next one's time runs
            self._head_timer = self.loop.call_later(self.read_seconds, self._head_is_late)

    def _feed(self, data: bytes) -> None:
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
            except httptools.HttpParserUpgrade as upgrade:
                # No other protocol is spoken here, and none need be: Java's client offers h2c with every request. The
                # parser takes what follows for that protocol, so another one reads it, of the same head without the
                # offer.
                rest = rest[upgrade.args[0] :]
                self._replay_head()
            else:
                return

    def _replay_head(self) -> None:
        framing = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in _FRAMING]
        self.parser = httptools.HttpRequestParser(self)
        self._replaying = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        finally:
            self._replaying = False

    @property
    def _is_answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def _is_idle(self) -> bool:
        return self._is_answered and self._body_timer is None and self.timeout_keep_alive_task is None

    def on_url(self, url: bytes) -> None:
        if self._replaying:
            return
        self._count(len(url), 414, "target")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._replaying:
            return
        self._count(len(name) + len(value), 431, "headers")
        if len(self.headers) >= MAX_HEADERS:
            self._refused = _Refused(431, f"more than {MAX_HEADERS} headers")
            raise self._refused
        super().on_header(name, value)

    def _count(self, size: int, status: int, what: str) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEADER_BYTES:
            self._refused = _Refused(status, f"the request's {what} are larger than {MAX_HEADER_BYTES} bytes")
            raise self._refused

    def on_headers_complete(self) -> None:
        if self._replaying:
            return
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        self._silent_bytes = 0
        super().on_headers_complete()
        if self._body_timer is None:
            self._body_timer = self.loop.call_later(self.read_seconds + LEAVE_SECONDS, self._body_is_late)

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # its body is still to come, see _feed
        self._silent_bytes = 0
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        super().on_message_complete()

    # ---- answers to what never becomes a request

    def send_400_response(self, msg: str) -> None:
        refused = self._refused or _Refused(400, "the request is not valid HTTP/1.1")
        self._refuse(refused.status, refused.message)
        self._abort_later()

    def _refuse(self, status: int, message: str) -> None:
        if not self._is_answered and self.cycle.response_started:
            self.transport.abort()  # in the middle of an answer nothing can be said
            return
        body = f'{{"error":"{message}"}}'.encode()
        head = (
            f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)


def guarded(read_seconds: float) -> type[asyncio.Protocol]:
    """The protocol class for ``uvicorn.Config(http=...)``."""
    return type("GuardedProtocol", (GuardedProtocol,), {"read_seconds": read_seconds})
