"""gRPC on the real engine: deadlines, cancellation and slow readers free what they must and are counted as what they
are; message sizes and compression."""

from __future__ import annotations

import asyncio

import grpc
import httpx
import pytest
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from tests.server.grpc_calls import Client, counts, infer_request, texts
from tests.server.harness import serving, wait_until

from carousel.engine.request import FinishReason

LIMIT = 100_000


@pytest.fixture(scope="module")
def tiny():
    with serving(max_request_bytes=LIMIT) as running:
        yield running


@pytest.fixture
async def client(tiny):
    tiny.engine.runner.step_s = 0.01
    async with Client(tiny.grpc) as client:
        yield client
    tiny.engine.runner.step_s = 0.0


def long(*prompts: str, **parameters: object):
    parameters = {"max_tokens": 400, "ignore_eos": True, **parameters}
    return infer_request(*(prompts or ("hello",)), model="tiny", **parameters)


class Books:
    """How many requests ended for each reason since this was made, when everything has ended."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.before = dict(engine.stats().finished)

    async def since(self) -> dict[str, int]:
        def live() -> int:
            stats = self.engine.stats()
            return stats.num_requests_running + stats.num_requests_waiting

        await asyncio.to_thread(wait_until, lambda: not live(), 5.0)
        stats = self.engine.stats()
        assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
        assert stats.admitted == sum(stats.finished.values())
        found = {reason: count - self.before.get(reason, 0) for reason, count in stats.finished.items()}
        return {reason.value: count for reason, count in found.items() if count}


@pytest.mark.parametrize("seconds", [0.25, 0.401, 1.001])
@pytest.mark.parametrize("step_s", [0.01, 0.15])
async def test_a_passed_deadline_is_a_timeout(tiny, client, seconds, step_s):
    """Exactly: whoever notices first, the client, gRPC on either side or the engine, and however long a step takes."""
    tiny.engine.runner.step_s = step_s
    books = Books(tiny.engine)
    error = await client.refusal(long("a", "b"), timeout=seconds)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await books.since() == {"timeout": 2}


async def test_the_deadline_of_a_stream_holds_for_its_requests(tiny, client):
    books = Books(tiny.engine)
    stream = client.open_stream(timeout=0.4)
    await stream.send(long(request_id="one"))
    await asyncio.sleep(0.1)
    await stream.send(long(request_id="two"))
    answers = await stream.until_error()
    assert await stream.call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert await books.since() == {"timeout": 2}
    assert {answer.infer_response.id for answer in answers} == {"one", "two"}


async def test_a_cancelled_call_is_cancelled(tiny, client):
    books = Books(tiny.engine)
    call = client.infer(long("a", "b"), timeout=30)
    await asyncio.to_thread(wait_until, lambda: tiny.engine.stats().num_requests_running == 2)
    call.cancel()
    assert await books.since() == {"cancelled": 2}


async def test_a_cancelled_stream_frees_all_its_requests(tiny, client):
    tiny.engine.runner.step_s = 0.05
    books = Books(tiny.engine)
    stream = client.open_stream()
    for _ in range(3):
        await stream.send(long())
    await stream.next()
    stream.call.cancel()
    assert await books.since() == {"cancelled": 3}


@pytest.mark.parametrize("how", ["timeout", "timeout_seconds", "metadata"])
async def test_a_timeout_of_its_own_gives_the_partial_answer(tiny, client, how):
    books = Books(tiny.engine)
    parameters = {"timeout": {"timeout": 200_000}, "timeout_seconds": {"timeout_seconds": "0.2"}}.get(how, {})
    metadata = (("x-request-timeout", "0.2"),) if how == "metadata" else ()
    response = await client.infer(long(**parameters), timeout=30, metadata=metadata)
    assert texts(response, "finish_reason") == ["timeout"]
    assert 0 < counts(response, "completion_tokens")[0] < 400
    answers = await client.stream(long(**parameters), metadata=metadata)
    assert texts(answers[-1].infer_response, "finish_reason") == ["timeout"]
    assert await books.since() == {"timeout": 2}


async def test_the_servers_limit_holds_whatever_the_client_allows(tiny, client):
    """A longer deadline or timeout of the client's must not lift ``request_timeout_seconds``."""
    limited = infer_request("hello", model="tiny", max_tokens=400, ignore_eos=True, timeout_seconds="60")
    with serving(request_timeout_seconds=0.2) as server:
        server.engine.runner.step_s = 0.01
        async with Client(server.grpc) as other:
            response = await other.infer(limited, timeout=60)
    assert texts(response, "finish_reason") == ["timeout"]


async def test_metrics_say_timeout_and_cancelled(tiny, client):
    books = Books(tiny.engine)
    await client.refusal(long(), timeout=0.1)
    assert await books.since() == {"timeout": 1}
    call = client.infer(long())
    await asyncio.to_thread(wait_until, lambda: tiny.engine.stats().num_requests_running == 1)
    call.cancel()
    assert await books.since() == {"timeout": 1, "cancelled": 1}
    text = (await asyncio.to_thread(httpx.get, tiny.url + "/metrics")).text
    finished = tiny.engine.stats().finished
    for reason in (FinishReason.TIMEOUT, FinishReason.CANCELLED):
        lines = [line for line in text.splitlines() if f'finished_reason="{reason.value}"' in line]
        assert any(line.endswith(f" {float(finished[reason])}") for line in lines), lines


async def test_a_slow_reader_stalls_nobody(tiny, client):
    """Nothing of the answers is read until all have ended in the engine; then each is there, whole."""
    tiny.engine.runner.step_s = 0.0
    alone = texts(await client.infer(long(temperature=0)))
    async with Client(tiny.grpc, [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]) as slow:
        stream = slow.open_stream()
        for i in range(6):
            await stream.send(long(request_id=str(i), temperature=0, cache_salt=str(i)))
        await asyncio.to_thread(wait_until, lambda: tiny.engine.stats().num_requests_running == 6)
        assert texts(await client.infer(long(temperature=0))) == alone
        await asyncio.to_thread(wait_until, lambda: tiny.engine.stats().num_requests_running == 0, 20.0)
        await stream.close()
        whole = dict.fromkeys("012345", "")
        async for answer in stream:
            whole[answer.infer_response.id] += texts(answer.infer_response)[0]
    assert set(whole.values()) == set(alone)


# sizes and compression


async def test_a_message_above_the_limit_is_refused(tiny, client):
    tiny.engine.runner.step_s = 0.0
    large = infer_request("a" * (LIMIT + 1), model="tiny")
    error = await client.refusal(large)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(LIMIT) in error.details()
    stream = client.open_stream()
    await stream.send(large)
    code, details = await stream.ended()
    assert (code, str(LIMIT) in details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, True)
    below = await client.refusal(infer_request("a" * (LIMIT - 1000), model="tiny"))
    assert below.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "inputs[0].data[0]" in below.details()


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_compressed_message_above_the_limit_is_refused_too(client, compression):
    bomb = infer_request("a" * 50_000_000, model="tiny")
    error = await client.refusal(bomb, compression=compression)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    response = await client.infer(long("a" * 100, max_tokens=1), compression=compression)
    assert counts(response, "prompt_tokens") == [100]
    (answer,) = await client.stream(long("a" * 100, max_tokens=1), compression=compression)
    assert counts(answer.infer_response, "prompt_tokens") == [100]


async def test_an_answer_above_the_clients_limit_is_the_clients_refusal(tiny, client):
    tiny.engine.runner.step_s = 0.0
    books = Books(tiny.engine)
    async with Client(tiny.grpc, [("grpc.max_receive_message_length", 100)]) as small:
        error = await small.refusal(long(max_tokens=200))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await books.since() == {"length": 1}


async def test_metadata_above_the_limit_is_refused(client):
    error = await client.refusal(long(), metadata=(("x-note", "x" * 20_000),))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_ids_and_traces_come_back(client):
    trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    call = client.infer(long(max_tokens=1), metadata=(("x-request-id", "id-7"), ("traceparent", trace)))
    initial = dict(await call.initial_metadata())
    assert initial["x-request-id"] == "id-7"
    assert initial["traceparent"].startswith("00-" + "a" * 32)
    await call
    made_up = dict(await client.infer(long(max_tokens=1), metadata=(("x-request-id", "two words"),)).initial_metadata())
    assert made_up["x-request-id"] != "two words"


async def test_retry_after_is_on_an_overload(tiny):
    with serving(max_queue_requests=1, max_batch_sequences=1) as server:
        server.engine.runner.step_s = 0.02
        async with Client(server.grpc) as client:
            calls = [client.infer(long(max_tokens=50)) for _ in range(5)]
            done = await asyncio.gather(*calls, return_exceptions=True)
    refused = [error for error in done if isinstance(error, aio.AioRpcError)]
    assert 0 < len(refused) < 5
    for error in refused:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.trailing_metadata())["retry-after"]) >= 1


async def test_keys_hold_for_streams_and_not_for_probes(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sesame-sesame=team\n")
    seen = []
    with serving(api_keys=str(keys)) as server:
        submit = server.engine.submit
        server.engine.submit = lambda request: (seen.append(request), submit(request))[1]
        async with Client(server.grpc) as client:
            code, _ = await client.open_stream().ended()
            assert code is grpc.StatusCode.UNAUTHENTICATED
            metadata = (("authorization", "Bearer sesame-sesame"), ("x-carousel-tenant", "other"))
            (answer,) = await client.stream(long(max_tokens=1), metadata=metadata)
            assert answer.error_message == ""
            watch = HealthStub(client.channel).Watch(HealthCheckRequest())
            assert (await watch.read()).status == HealthCheckResponse.SERVING
            watch.cancel()
    assert [request.tenant for request in seen] == ["team"]
