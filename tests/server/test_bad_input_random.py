"""Random and mutated bodies against the whole application, in process: always an answer, never a server's fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.engine.tiny import started_engine
from tests.server.bad_values import PROTOCOLS
from tests.server.test_bad_input_transport import BINARY
from tests.server.tiny_server import INFER

from carousel.config import Settings
from carousel.engine.engine import Engine
from carousel.lifecycle import Lifecycle
from carousel.middleware import RequestLayer

JSON = {"content-type": "application/json"}
TEXT = st.text(max_size=6) | st.sampled_from(["\ud800", "tiny", "user", "text", "[1]", "BYTES", "text_input"])
SCALAR = st.none() | st.booleans() | st.integers(-5, 400) | st.integers() | st.floats() | TEXT | st.just(10**400)
ANY = st.recursive(
    SCALAR, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
NOISE = st.binary(max_size=4) | st.sampled_from(
    [b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\u", b"\\ud800", b"null", b"-", b"1e999"]
)
COMMON = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


class InProcess:
    """The application around a real engine, without a socket. Answers take a few tokens at most, or they time out."""

    def __init__(self) -> None:
        from carousel.predictor import CarouselModel
        from carousel.server import listen
        from carousel.serving import CarouselServer

        self.loop = asyncio.new_event_loop()
        self.engine = started_engine()
        configured = Settings(model="tiny", model_name="tiny", grpc=False, request_timeout_seconds=0.5)
        lifecycle = Lifecycle(configured, lambda _: self.engine)
        lifecycle.start()
        self.loop.run_until_complete(lifecycle.wait_loaded())
        self.socket = listen("127.0.0.1", 0)
        model = CarouselModel("tiny", lifecycle)
        server = CarouselServer(configured, lifecycle, self.socket, 0.0)
        server.register_model(model)
        app = RequestLayer(server.build_app(model), max_body_bytes=100_000)
        self.client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x", timeout=30)

    def post(self, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
        return self.loop.run_until_complete(self.client.post(path, content=body, headers=headers))

    def close(self) -> None:
        self.loop.run_until_complete(self.client.aclose())
        assert not asyncio.all_tasks(self.loop)
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()
        self.socket.close()
        check_engine(self.engine)
        self.engine.stop()


def check_engine(engine: Engine) -> None:
    stats = engine.stats()
    assert stats.num_requests_running == stats.num_requests_waiting == 0
    assert stats.admitted == sum(stats.finished.values())
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    assert engine.alive


@pytest.fixture(scope="module")
def app() -> Iterator[InProcess]:
    running = InProcess()
    yield running
    running.close()


def check(response: httpx.Response, path: str) -> None:
    # 504: OpenAI's forms cannot carry a timeout, and a random one may be tiny
    assert response.status_code in (200, 400, 404, 415, 422, 429, 504), (response.status_code, response.text[:300])
    if response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.endswith("\n\n")
    elif response.headers["content-type"] == "application/json":
        json.loads(response.content)
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"] if path.startswith(("/v1/c", "/token", "/detoken")) else error
        assert len(response.content) < 2000


def body_of(name: str, changes: dict[str, Any]) -> bytes:
    good = {field: json.loads(value) for field, value in PROTOCOLS[name].good.items()}
    return json.dumps({**good, **changes}).encode("utf-8", "surrogatepass")


@pytest.mark.parametrize("name", PROTOCOLS)
@COMMON
@given(data=st.data())
def test_random_fields(app: InProcess, name: str, data: st.DataObject) -> None:
    protocol = PROTOCOLS[name]
    fields = st.sampled_from([*protocol.fields, *protocol.good])
    changes = data.draw(st.dictionaries(fields, ANY, max_size=3))
    if protocol.parameters:
        names = st.sampled_from(sorted(protocol.parameters))
        changes.setdefault("parameters", data.draw(st.dictionaries(names, ANY, max_size=3)))
    check(app.post(protocol.path, body_of(name, changes), JSON), protocol.path)


@pytest.mark.parametrize("name", PROTOCOLS)
@COMMON
@given(body=ANY)
def test_random_bodies(app: InProcess, name: str, body: Any) -> None:
    path = PROTOCOLS[name].path
    check(app.post(path, json.dumps(body).encode("utf-8", "surrogatepass"), JSON), path)


@pytest.mark.parametrize("name", PROTOCOLS)
@COMMON
@given(places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 8), NOISE), min_size=1, max_size=4))
def test_mutated_bodies(app: InProcess, name: str, places: list[tuple[int, int, bytes]]) -> None:
    path = PROTOCOLS[name].path
    check(app.post(path, mutated(PROTOCOLS[name].body(), places), JSON), path)


@COMMON
@given(
    case=st.sampled_from(sorted(BINARY)),
    places=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 8), NOISE), max_size=4),
    length=st.integers(0, 200)
    | st.none()
    | st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=5),
)
def test_mutated_binary_tensors(
    app: InProcess, case: str, places: list[tuple[int, int, bytes]], length: int | str | None
) -> None:
    raw = mutated(BINARY[case][0], places)
    split = raw.find(b"}]}") + 3 if length is None else length
    headers = {"content-type": "application/octet-stream", "inference-header-content-length": str(split)}
    check(app.post(INFER, raw, headers), INFER)


def mutated(raw: bytes, places: list[tuple[int, int, bytes]]) -> bytes:
    """Each place: where, how many bytes go, which come."""
    data = bytearray(raw)
    for at, gone, come in places:
        start = at % (len(data) + 1)
        data[start : start + gone] = come
    return bytes(data)
