"""What goes wrong below the protocols: sizes, times, framing, content types, connections that end anywhere."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from unittest.mock import patch

import httpx
import pytest
from tests.server.harness import wait_until
from tests.server.tiny_server import (
    CHAT,
    GENERATE,
    INFER,
    PREDICT,
    STREAM,
    TEXT,
    TOKENIZE,
    Neighbour,
    TinyServer,
    lone_answer,
    tiny_server,
)

LIMIT = 100_000
WAIT_S = 0.5
JSON = {"content-type": "application/json"}
GOOD = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    TEXT: {"prompt": "hi", "max_tokens": 2},
    TOKENIZE: {"prompt": "hi"},
    PREDICT: {"instances": ["hi"], "parameters": {"max_tokens": 2}},
    INFER: {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}],
        "parameters": {"max_tokens": 2},
    },
    GENERATE: {"text_input": "hi", "parameters": {"max_tokens": 2}},
    STREAM: {"text_input": "hi", "parameters": {"max_tokens": 2}},
}
INVALID = {path: 422 if path in (GENERATE, STREAM) else 400 for path in GOOD}


@pytest.fixture(scope="module")
def tiny() -> Iterator[TinyServer]:
    leave = patch("carousel.http_protocol.LEAVE_SECONDS", 0.5)
    with leave, tiny_server(max_request_bytes=LIMIT, read_timeout_seconds=WAIT_S, trust_tenant_header=True) as running:
        alone = lone_answer(running)
        with Neighbour(running) as beside:
            yield running
        beside.expect_undisturbed(alone)
        running.expect_clean()


@pytest.fixture(scope="module")
def client(tiny: TinyServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.url, timeout=10) as client:
        yield client


def error_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    return str(error["message"] if isinstance(error, dict) else error)


def connect(tiny: TinyServer) -> socket.socket:
    return socket.create_connection(tiny.address, timeout=10)


def head(path: str, *lines: str, method: str = "POST") -> bytes:
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *lines, "", ""]
    ).encode()


def read_all(sock: socket.socket) -> bytes:
    """Until the server closes the connection; a reset counts as closed."""
    data = b""
    try:
        while piece := sock.recv(65536):
            data += piece
    except ConnectionResetError:
        pass
    return data


# ---- bodies that are no JSON


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "raw",
    [
        b"", b" ", b"{", b"[", b'"', b"null", b"[]", b"1", b'{"a":}', b"{'a':1}", b"\xff\xfe{}", b'{"prompt": "\xc3"}',
        b"\xef\xbb\xbf{}", b"[" * 90_000, b'{"a":' * 15_000, b"[" * 45_000 + b"]" * 45_000, b'{"a":NaN}', b"\x00" * 100,
        b"{}{}", b"{} x", '{"text_input": "hi"}'.encode("utf-16"), b'{"x": "\\ud800', b"-" * 50_000, b"1" * 50_000,
    ],
    ids=lambda raw: repr(raw[:12]) + str(len(raw)),
)  # fmt: skip
def test_a_body_that_is_no_good_json(client: httpx.Client, path: str, raw: bytes) -> None:
    response = client.post(path, content=raw, headers=JSON)
    assert response.status_code == INVALID[path], response.text
    assert "body" in error_of(response)
    assert len(response.text) < 1000


@pytest.mark.parametrize("path", GOOD)
def test_content_types_and_encodings(client: httpx.Client, path: str) -> None:
    raw = json.dumps(GOOD[path]).encode()
    for kind in (
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data",
        "application/xml",
        "x" * 500,
    ):
        response = client.post(path, content=raw, headers={"content-type": kind})
        assert response.status_code == 415, kind
        assert "content-type" in error_of(response)
    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON", "application/vnd.x+json"):
        assert client.post(path, content=raw, headers={"content-type": kind}).status_code == 200, kind
    assert client.post(path, content=raw).status_code == 200  # says nothing: taken for what it must be
    for encoding in ("gzip", "br", "deflate, gzip"):
        response = client.post(path, content=raw, headers=JSON | {"content-encoding": encoding})
        assert (response.status_code, "content-encoding" in error_of(response)) == (415, True)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/other:predict", "/v2/models/other/infer", "/v2/models/other/generate", "/v9/nothing",
        "/v2/models/tiny/versions/7/infer", "/v2/models/other/generate_stream", "/v2/models/tiny/versions/x/generate",
        "/v2/models/%00/infer", "/v2/models/%ff%fe/generate", "/v2/models/" + "x" * 5000 + "/infer", "//",
        "/v2/models/a%0d%0ab/infer", "/..%2f..%2fetc", "/v2/models/%ed%a0%80/infer", "/v1/models/tiny:explainx",
        "/v2/models//infer",
    ],
)  # fmt: skip
def test_unknown_models_versions_and_paths(client: httpx.Client, path: str) -> None:
    response = client.post(path, content=b"{}", headers=JSON)
    assert response.status_code in (404, 405), response.text
    assert len(error_of(response)) < 500


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "PROPFIND"])
def test_bad_methods(client: httpx.Client, path: str, method: str) -> None:
    response = client.request(method, path, content=b"{}", headers=JSON)
    if (method, path) == ("GET", PREDICT):  # V1's metadata of a model, of which there is none of the name tiny:predict
        assert response.status_code == 404
        return
    assert response.status_code == 405
    assert method == "HEAD" or "Not Allowed" in error_of(response)


@pytest.mark.parametrize("path", GOOD)
def test_odd_headers_are_refused_or_ignored(client: httpx.Client, path: str) -> None:
    numeric = {
        "x-request-timeout": ("x", "-1", "0", "nan", "1e9", "9" * 400),
        "x-carousel-priority": ("x", "1.5", "9" * 400),
    }
    numeric |= {"x-carousel-deadline": ("x", "inf", "-0"), "x-carousel-tenant": ("x" * 129, "\x85")}
    for name, values in numeric.items():
        for value in values:
            raw = json.dumps(GOOD[path])
            response = client.post(
                path,
                content=raw,
                headers=[(b"content-type", b"application/json"), (name.encode(), value.encode("latin-1"))],
            )
            if path != TOKENIZE:  # generates nothing, so nothing has a priority
                assert response.status_code == INVALID[path], (name, value, response.text)
                assert name in error_of(response)
    for name in ("x-request-id", "traceparent", "authorization", "ce-specversion", "accept", "cookie", "range"):
        for value in ("", "\xff" * 50, "a b", "00-" + "0" * 32 + "-" + "0" * 16 + "-00", "x" * 3000):
            headers = [(b"content-type", b"application/json"), (name.encode(), value.encode("latin-1"))]
            response = client.post(path, content=json.dumps(GOOD[path]), headers=headers)
            assert response.status_code < 500, (name, value, response.text)


# ---- the binary tensor extension


def tensor(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def binary_body(raw: bytes, *, size: object = None, shape: object = None, kind: str = "BYTES", more: str = "") -> bytes:
    item = {"name": "text_input", "datatype": kind, "shape": shape or [1]}
    item["parameters"] = {"binary_data_size": len(raw) if size is None else size}
    return json.dumps({"inputs": [item]}).encode() + more.encode() + raw


HI = tensor(b"hi")
BINARY = {
    "size too large": (binary_body(HI, size=7), None, "inputs[0].parameters"),
    "size too small": (binary_body(HI, size=5), None, "body"),
    "size is negative": (binary_body(HI, size=-1), None, "binary_data_size"),
    "size is huge": (binary_body(HI, size=2**70), None, "inputs[0].parameters"),
    "size is text": (binary_body(HI, size="6"), None, "binary_data_size"),
    "size is true": (binary_body(HI, size=True), None, "binary_data_size"),
    "too few elements": (binary_body(HI, shape=[2]), None, "inputs[text_input]"),
    "too many elements": (binary_body(HI + HI), None, "inputs[text_input]"),
    "empty": (binary_body(b""), None, "inputs[text_input]"),
    "cut length": (binary_body(b"\x02\x00"), None, "inputs[text_input]"),
    "cut text": (binary_body(b"\x05\x00\x00\x00hi"), None, "inputs[text_input]"),
    "length 2**32-1": (binary_body(b"\xff\xff\xff\xffhi"), None, "inputs[text_input]"),
    "not UTF-8": (binary_body(tensor(b"\xff\xfe")), None, "UTF-8"),
    "a surrogate": (binary_body(tensor(b"\xed\xa0\x80")), None, "UTF-8"),
    "wrong datatype": (binary_body(HI, kind="FP32"), None, "text_input"),
    "unknown datatype": (binary_body(HI, kind="X"), None, "inputs"),
    "huge shape": (binary_body(HI, shape=[2**62]), None, "inputs[text_input]"),
    "huger shape": (binary_body(HI, shape=[2**40, 2**40]), None, "inputs[text_input]"),
    "shape 0": (binary_body(b"", shape=[0]), None, "inputs[0].shape"),
    "header too long": (binary_body(HI), "99999", "Inference-Header-Content-Length"),
    "header negative": (binary_body(HI), "-1", "Inference-Header-Content-Length"),
    "header empty": (binary_body(HI), "", "Inference-Header-Content-Length"),
    "header is text": (binary_body(HI), "x", "Inference-Header-Content-Length"),
    "header is a float": (binary_body(HI), "1.5", "Inference-Header-Content-Length"),
    "header of digits": (binary_body(HI), "9" * 5000, "Inference-Header-Content-Length"),
    "header zero": (binary_body(HI), "0", "body"),
    "header cuts the JSON": (binary_body(HI), "20", "body"),
    "header into the tensor": (binary_body(HI), "+2", "body"),
}


@pytest.mark.parametrize("case", BINARY)
def test_bad_binary_tensors(client: httpx.Client, case: str) -> None:
    raw, header, named = BINARY[case]
    length = raw.index(b"]}") + 2 if raw.count(b"]}") == 1 else raw.rindex(b"}]}") + 3
    if header == "+2":
        header = str(length + 2)
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": header or str(length)}
    if header == "":
        headers["inference-header-content-length"] = ""
    response = client.post(INFER, content=raw, headers=headers)
    assert response.status_code == 400, response.text
    assert named in error_of(response)


def test_a_good_binary_tensor_beside_them(client: httpx.Client) -> None:
    raw = binary_body(HI)
    headers = {"inference-header-content-length": str(raw.rindex(b"}]}") + 3)}
    assert client.post(INFER, content=raw, headers=headers).status_code == 200


# ---- size


@pytest.mark.parametrize("path", [*GOOD, "/nothing/here"])
@pytest.mark.parametrize("how", ["declared", "chunked", "lied"])
def test_oversized_bodies_are_413(tiny: TinyServer, path: str, how: str) -> None:
    with connect(tiny) as sock:
        if how == "declared":
            sock.sendall(head(path, f"Content-Length: {LIMIT + 1}"))
        else:
            sock.sendall(head(path, "Transfer-Encoding: chunked"))
            try:
                for _ in range(LIMIT // 10_000 + 2):
                    sock.sendall(b"2710\r\n" + b" " * 10_000 + b"\r\n")
            except (ConnectionResetError, BrokenPipeError):
                assert how == "chunked"
        answer = sock.recv(65536)
    status = int(answer.split()[1])
    assert status == (404 if path == "/nothing/here" and how != "declared" else 413)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: " + b"x" * 200_000, 431),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n", 431),
        (
            b"GET / HTTP/1.1\r\n" + b"a: " + b"x" * 5_000 + b"\r\n" + (b"a: " + b"x" * 5_000 + b"\r\n") * 20 + b"\r\n",
            431,
        ),
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        (b"\r\n" * 100_000, 431),
        (b"x" * 100_000, 400),
        (b"GET / HTTP/9.9\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100, 400),  # TLS to a plain port
        (b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: x\r\n\r\n{}", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_heads_are_refused_in_json(tiny: TinyServer, sent: bytes, status: int) -> None:
    with connect(tiny) as sock:
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            sock.sendall(sent)
        answer = read_all(sock)
    if answer:  # a server that closes on unread data may reset the connection, and the answer with it
        assert int(answer.split()[1]) == status, answer[:200]
        assert "error" in json.loads(answer.partition(b"\r\n\r\n")[2].splitlines()[-1])
    else:
        assert len(sent) > 50_000


@pytest.mark.parametrize("chunk", [b"xyz\r\n{}", b"ffffffffffffffffff\r\n", b"-1\r\n", b"2\r\n{}{}\r\n", b"\r\n\r\n"])
def test_bad_chunks(tiny: TinyServer, chunk: bytes) -> None:
    with connect(tiny) as sock:
        sock.sendall(head(GENERATE, "Transfer-Encoding: chunked") + chunk)
        assert int(read_all(sock).split()[1]) in (400, 408, 422)


def test_an_endless_trailer_is_cut_off(tiny: TinyServer) -> None:
    with connect(tiny) as sock:
        try:
            sock.sendall(head("/nothing", "Transfer-Encoding: chunked") + b"0\r\n")
            for _ in range(100):
                sock.sendall(b"x" * 10_000)
                time.sleep(0.001)
        except (ConnectionResetError, BrokenPipeError):
            return
        read_all(sock)


# ---- time


def trickle(sock: socket.socket, first: bytes, piece: bytes) -> bytes:
    """What the server says until it closes; ``piece`` comes every 50 ms, so that no single read waits for long."""
    deadline, said = time.monotonic() + 30, b""
    sock.sendall(first)
    sock.settimeout(0.05)
    while time.monotonic() < deadline:
        try:
            sock.sendall(piece)
            data = sock.recv(65536)
            if not data:
                return said
            said += data
        except TimeoutError:
            continue
        except (ConnectionResetError, BrokenPipeError):
            return said
    raise AssertionError(f"still open; it said {said[:200]!r}")


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"", b""),
        (b"P", b""),
        (b"POST / HTTP/1.1\r\n", b"a: b\r\n"),
        (b"POST / HTTP/1.1\r\na: ", b"x"),
        (b"GET /", b"x"),
        (b"\r\n", b"\r\n"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\nGE", b""),
    ],
)
def test_slow_headers_are_ended(tiny: TinyServer, first: bytes, piece: bytes) -> None:
    with connect(tiny) as sock:
        said = trickle(sock, first, piece)
    assert b"408 Request Timeout" in said
    assert json.loads(said.rpartition(b"\r\n\r\n")[2])["error"].startswith("the request's headers did not arrive")


@pytest.mark.parametrize("path", GOOD)
def test_slow_bodies_are_ended_in_the_protocols_form(tiny: TinyServer, path: str) -> None:
    with connect(tiny) as sock:
        said = trickle(sock, head(path, "Content-Length: 50000") + b"{", b" ")
    status, body = said.split(b" ", 2)[1], json.loads(said.partition(b"\r\n\r\n")[2])
    assert status == b"408"
    assert "did not arrive within 0.5 s" in json.dumps(body)
    assert isinstance(body["error"], dict) == (path in (CHAT, TEXT, TOKENIZE))


@pytest.mark.parametrize("path", ["/nothing/here", "/livez", CHAT])
def test_slow_bodies_that_nobody_reads_are_ended(tiny: TinyServer, path: str) -> None:
    kind = "Content-Type: text/plain" if path == CHAT else "X: y"
    with connect(tiny) as sock:
        said = trickle(sock, head(path, "Content-Length: 50000", kind), b"x")
    assert said.split()[1] in (b"404", b"405", b"408", b"415")


def test_an_answer_that_nobody_reads_is_ended(tiny: TinyServer) -> None:
    """The answers to many pipelined requests fill every buffer; the server does not keep them for ever."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(tiny.address)
        sock.settimeout(0.5)
        request = head("/metrics", method="GET").replace(b"Content-Type: application/json\r\n", b"")
        try:
            for _ in range(2000):
                sock.sendall(request)
        except (TimeoutError, ConnectionResetError, BrokenPipeError):
            pass
        wait_until(lambda: _is_reset(sock))


def _is_reset(sock: socket.socket) -> bool:
    try:
        sock.send(b"GET /livez HTTP/1.1\r\n\r\n")
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


# ---- connections that end anywhere, and requests behind requests


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("how", ["fin", "rst", "half"])
@pytest.mark.parametrize("part", ["head", "body", "whole"])
def test_connections_that_end_anywhere(tiny: TinyServer, path: str, how: str, part: str) -> None:
    raw = json.dumps(GOOD[path]).encode()
    whole = head(path, f"Content-Length: {len(raw)}") + raw
    cut = {"head": 40, "body": len(whole) - 5, "whole": len(whole)}[part]
    with connect(tiny) as sock:
        sock.sendall(whole[:cut])
        if how == "rst":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif how == "half":
            sock.shutdown(socket.SHUT_WR)
            read_all(sock)


@pytest.mark.parametrize("path", GOOD)
def test_pipelined_requests_are_answered_in_turn(tiny: TinyServer, path: str) -> None:
    raw = json.dumps(GOOD[path]).encode()
    whole, bad = head(path, f"Content-Length: {len(raw)}") + raw, head(path, "Content-Length: 1") + b"{"
    with connect(tiny) as sock:
        sock.sendall(whole + bad + whole + head("/livez", "Connection: close", method="GET"))
        answer = read_all(sock)
    statuses = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answer)]
    assert statuses == [200, INVALID[path], 200, 200]


@pytest.mark.parametrize("upgrade", ["websocket", "h2c", "x"])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_an_offered_upgrade_is_not_taken_and_harms_nothing(
    tiny: TinyServer, upgrade: str, chunked: bool, together: bool
) -> None:
    """Java's client offers h2c with every request; the parser then takes the body for the other protocol."""
    raw = json.dumps(GOOD[GENERATE]).encode()
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(raw)}"
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(raw), raw) if chunked else raw
    first = head(GENERATE, length, "Connection: Upgrade, HTTP2-Settings", f"Upgrade: {upgrade}")
    last = head("/livez", "Connection: close, Upgrade", f"Upgrade: {upgrade}", method="GET")
    with connect(tiny) as sock:
        for piece in [first + body + last] if together else [first, body[:5], body[5:], last]:
            sock.sendall(piece)
            time.sleep(0 if together else 0.01)
        answer = read_all(sock)
    assert re.findall(rb"HTTP/1\.1 (\d+) ", answer) == [b"200", b"200"]
    assert b"text_output" in answer
    assert b"alive" in answer


def test_many_offered_upgrades_in_one_piece(tiny: TinyServer) -> None:
    offer = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
    with connect(tiny) as sock:
        sock.sendall(offer * 1500 + head("/livez", "Connection: close", method="GET"))
        assert read_all(sock).count(b"HTTP/1.1 200 OK") == 1501


def test_half_a_request_behind_a_long_stream_does_not_end_it(tiny: TinyServer) -> None:
    """Its own time begins when the stream is over."""
    long = {"text_input": "hi", "parameters": {"max_tokens": 500, "ignore_eos": True, "temperature": 0}}
    raw = json.dumps(long).encode()
    with contextlib.ExitStack() as stack:
        for _ in range(8):  # together they take longer than a head may
            stack.enter_context(connect(tiny)).sendall(head(GENERATE, f"Content-Length: {len(raw)}") + raw)
        sock = stack.enter_context(connect(tiny))
        sock.sendall(head(STREAM, f"Content-Length: {len(raw)}") + raw + b"POST /")
        answer = read_all(sock)
    assert b'"finish_reason":"length"' in answer
    assert b"408 Request Timeout" in answer


@pytest.mark.parametrize("target", ["x:443", "/", "http://x/"])
def test_connect_is_refused(tiny: TinyServer, target: str) -> None:
    with connect(tiny) as sock:
        sock.sendall(head(target, "Connection: close", method="CONNECT") + b"\x16\x03\x01" * 50)
        assert read_all(sock).split()[1] in (b"400", b"404", b"405")


def test_expect_continue(tiny: TinyServer) -> None:
    raw = json.dumps(GOOD[GENERATE]).encode()
    with connect(tiny) as sock:
        sock.sendall(head(GENERATE, f"Content-Length: {len(raw)}", "Expect: 100-continue", "Connection: close"))
        assert b"100 Continue" in sock.recv(1000)
        sock.sendall(raw)
        assert b"200 OK" in read_all(sock)
