"""``ModelStreamInfer``: what each response holds, many requests on one stream, and every way in which it can end."""

from __future__ import annotations

import asyncio
import signal

import grpc
import pytest
from tests.server.grpc_calls import Client, counts, infer_request, is_final, texts
from tests.server.harness import wait_until

from carousel import grpc_stream
from carousel.engine.errors import EngineUnavailable, QueueFull
from carousel.engine.request import FinishReason

LONG = 2000


@pytest.fixture
async def client(server):
    server.engine.ended.clear()
    async with Client(server.grpc) as client:
        yield client


async def until(condition) -> None:
    await asyncio.to_thread(wait_until, condition, 5.0)


async def test_a_response_per_delta(client):
    answers = await client.stream(infer_request("abc", request_id="my id", max_tokens=3))
    assert [answer.error_message for answer in answers] == ["", "", ""]
    messages = [answer.infer_response for answer in answers]
    assert {(message.id, message.model_name, message.model_version) for message in messages} == {("my id", "fake", "1")}
    assert [texts(message) for message in messages] == [["w0 "], ["w1 "], ["w2 "]]
    assert [texts(message, "finish_reason") for message in messages] == [[""], [""], ["length"]]
    assert [counts(message, "completion_tokens") for message in messages] == [[1], [2], [3]]
    assert [counts(message, "prompt_tokens") for message in messages] == [[3], [3], [3]]
    assert [is_final(answer) for answer in answers] == [False, False, True]


async def test_rows_of_a_batch_join_to_the_answers(client, server):
    server.engine.delay_s = 0.002
    answers = await client.stream(infer_request("a", "bcd", "ef", max_tokens=5, logprobs=1))
    rows = [texts(answer.infer_response) for answer in answers]
    assert ["".join(row) for row in zip(*rows, strict=True)] == ["w0 w1 w2 w3 w4 "] * 3
    ends = [texts(answer.infer_response, "finish_reason") for answer in answers]
    assert ["".join(row) for row in zip(*ends, strict=True)] == ["length"] * 3
    assert counts(answers[-1].infer_response, "completion_tokens") == [5, 5, 5]
    assert counts(answers[-1].infer_response, "prompt_tokens") == [1, 3, 2]
    assert [is_final(answer) for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert len(answers) < 15, "what arrives together is sent together"


async def test_an_empty_final_response_if_asked_for(client):
    asked = {"triton_enable_empty_final_response": True}
    answers = await client.stream(infer_request("a", request_id="7", max_tokens=2, **asked))
    assert [is_final(answer) for answer in answers] == [False, False, True]
    assert texts(answers[1].infer_response, "finish_reason") == ["length"]
    last = answers[2].infer_response
    assert (last.id, len(last.outputs), answers[2].error_message) == ("7", 0, "")


async def test_the_whole_answer_at_once_if_asked_for(client):
    answers = await client.stream(infer_request("a", max_tokens=3, stream=False))
    assert [texts(answer.infer_response) for answer in answers] == [["w0 w1 w2 "]]
    assert is_final(answers[0])


async def test_only_the_outputs_that_were_asked_for(client):
    message = infer_request("a", max_tokens=1)
    message.outputs.add(name="finish_reason")
    (answer,) = await client.stream(message)
    assert [output.name for output in answer.infer_response.outputs] == ["finish_reason"]


async def test_requests_share_a_stream(client, server):
    server.engine.delay_s = 0.005
    requests = [infer_request("a", request_id=f"r{i}", max_tokens=4 + i) for i in range(8)]
    answers = [answer.infer_response for answer in await client.stream(*requests)]
    for i in range(8):
        own = "".join(texts(message)[0] for message in answers if message.id == f"r{i}")
        assert own == "".join(f"w{k} " for k in range(4 + i))
    order = [message.id for message in answers]
    assert order != sorted(order), "they ran side by side"


async def test_an_error_ends_its_request_and_not_the_stream(client, server):
    stream = client.open_stream()
    server.engine.delay_s = 0.01
    await stream.send(infer_request("a", request_id="good", max_tokens=20))
    for request_id, bad in (
        ("bad", infer_request("a", request_id="bad", temperature="-1")),
        ("other", infer_request("a", request_id="other", model="other")),
        ("", b"\xff\xff no message"),
        ("", infer_request("a", max_tokens=0)),
    ):
        await stream.send(bad)
        while not (answer := await stream.next()).error_message:
            assert answer.infer_response.id == "good"
        assert answer.error_message.startswith(f"[request id: {request_id or '<id_unknown>'}] ")
        assert answer.infer_response.id == request_id
        assert is_final(answer)
    await stream.close()
    rest = [answer.infer_response async for answer in stream]
    assert texts(rest[-1], "finish_reason") == ["length"]
    assert await stream.ended() == (grpc.StatusCode.OK, "")


@pytest.mark.parametrize(
    ("error", "code", "seconds"),
    [
        (QueueFull("full", 2.5), "RESOURCE_EXHAUSTED", "3"),
        (EngineUnavailable("draining", 4), "UNAVAILABLE", "4"),
    ],
)
async def test_overload_says_when_to_come_back(client, server, error, code, seconds):
    server.engine.refuse = error
    (answer,) = await client.stream(infer_request("a", request_id="7"))
    parameters = answer.infer_response.parameters
    assert (parameters["grpc_status"].string_param, parameters["retry-after"].string_param) == (code, seconds)
    assert answer.error_message == f"[request id: 7] {error}"


async def test_an_engine_that_fails_mid_stream(client, server):
    server.engine.delay_s = 0.01
    stream = client.open_stream()
    await stream.send(infer_request("a", "b", request_id="7", max_tokens=LONG))
    await stream.next()
    server.engine.failure = "it broke"
    while not (answer := await stream.next()).error_message:
        pass
    assert answer.error_message == "[request id: 7] it broke"
    assert answer.infer_response.parameters["grpc_status"].string_param == "INTERNAL"
    stream.call.cancel()


@pytest.mark.parametrize("how", ["cancel", "connection"])
async def test_a_client_that_leaves_frees_its_requests(client, server, how):
    server.engine.delay_s = 0.01
    stream = client.open_stream()
    for prompts in (("a",), ("b", "c")):
        await stream.send(infer_request(*prompts, max_tokens=LONG))
    await until(lambda: len(server.engine.live) == 3)
    await stream.next()
    if how == "cancel":
        stream.call.cancel()
    else:
        await client.channel.close()
    await until(lambda: not server.engine.live)
    assert [ended.ended for ended in server.engine.ended] == [FinishReason.CANCELLED] * 3


async def test_half_closed_streams_are_served_to_the_end(client, server):
    server.engine.delay_s = 0.005
    stream = client.open_stream()
    await stream.send(infer_request("a", max_tokens=30))
    await stream.close()
    answers = [answer async for answer in stream]
    assert texts(answers[-1].infer_response, "finish_reason") == ["length"]


async def test_a_stream_without_requests(client):
    assert await client.stream() == []


async def test_a_flood_on_one_stream_is_read_no_faster_than_answered(client, server, monkeypatch):
    monkeypatch.setattr(grpc_stream, "MAX_OPEN_REQUESTS", 16)
    server.engine.delay_s = 1.0
    stream = client.open_stream()
    for _ in range(60):
        await stream.send(infer_request("a", max_tokens=1))
    await until(lambda: len(server.engine.live) == 16)
    await asyncio.sleep(0.2)
    assert len(server.engine.live) == 16
    server.engine.delay_s = 0.0
    await stream.close()
    assert len([answer async for answer in stream]) == 60
    assert not server.engine.live


async def test_metadata_holds_for_the_requests_of_the_stream(client, server):
    seen = []
    submit = server.engine.submit
    server.engine.submit = lambda request: (seen.append(request), submit(request))[1]
    metadata = (
        ("x-carousel-tenant", "team"), ("x-carousel-priority", "-3"), ("x-request-timeout", "30"),
        ("x-request-id", "stream-1"),
    )  # fmt: skip
    try:
        stream = client.open_stream(metadata=metadata)
        await stream.send(infer_request("a", max_tokens=1))
        await stream.send(infer_request("a", max_tokens=1, timeout_seconds=5))
        await stream.close()
        assert [answer.error_message async for answer in stream] == ["", ""]
        assert dict(await stream.call.initial_metadata())["x-request-id"] == "stream-1"
    finally:
        del server.engine.submit
    assert [(r.tenant, r.priority, r.timeout_s) for r in seen] == [("team", -3, 30.0), ("team", -3, 5.0)]
    assert seen[0].request_id != seen[1].request_id


async def test_draining_streams(spawn):
    """Admitted requests finish, new ones are refused on the open stream, new streams are refused, all ends cleanly."""
    server = spawn(delay=0.05, drain=8)
    await asyncio.to_thread(server.wait_ready)
    address = f"127.0.0.1:{server.grpc_port}"
    async with Client(address) as client, Client(address) as late, Client(address) as idle:
        stream, idle_stream = client.open_stream(), idle.open_stream()
        await stream.send(infer_request("a", request_id="old", max_tokens=30))
        await idle_stream.send(infer_request("a", max_tokens=1))
        await idle_stream.next()
        await stream.next()
        server.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        await stream.send(infer_request("a", request_id="new", max_tokens=1))
        code, details = await late.open_stream().ended()
        assert (code, details) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
        answers = await stream.until_error()
        assert await stream.call.code() is grpc.StatusCode.UNAVAILABLE
        assert int(dict(await stream.call.trailing_metadata())["retry-after"]) >= 1
        (refused,) = [answer for answer in answers if answer.error_message]
        assert refused.error_message == "[request id: new] the server is shutting down"
        whole = [answer.infer_response for answer in answers if answer.infer_response.id == "old"]
        assert "".join(texts(message)[0] for message in whole) == "".join(f"w{i} " for i in range(1, 30))
        assert (await idle_stream.ended())[0] is grpc.StatusCode.UNAVAILABLE
    code, log = await asyncio.to_thread(server.finish)
    assert code == 0, log
    assert '"level":"error"' not in log, log


async def test_requests_that_outlast_the_drain_end_with_an_error(spawn):
    server = spawn(delay=0.05, drain=0.5)
    await asyncio.to_thread(server.wait_ready)
    async with Client(f"127.0.0.1:{server.grpc_port}") as client:
        stream = client.open_stream()
        await stream.send(infer_request("a", request_id="long", max_tokens=LONG))
        await stream.next()
        whole = asyncio.ensure_future(client.refusal(infer_request("a", max_tokens=LONG)))
        await asyncio.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        while not (answer := await stream.next()).error_message:
            pass
        assert answer.error_message.startswith("[request id: long] the server shut down")
        assert (await stream.ended())[0] is grpc.StatusCode.UNAVAILABLE
        assert "shut down" in (await whole).details()
    code, log = await asyncio.to_thread(server.finish)
    assert code == 0, log
