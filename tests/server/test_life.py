"""Stops, deaths, deadlines and health of a server around the real engine on a tiny model."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tests.server.fake_engine import FakeEngine, fake_factory
from tests.server.harness import Running, answers, serving, tiny_factory, wait_until

from carousel.telemetry.logs import JsonFormatter

PREDICT, INFER = "/v1/models/tiny:predict", "/v2/models/tiny/infer"
GENERATE, STREAM = "/v2/models/tiny/generate", "/v2/models/tiny/generate_stream"
COMPLETION, CHAT = "/v1/completions", "/openai/v1/chat/completions"
STATES = ("/livez", "/readyz", "/startupz", "/", "/v2/health/live", "/v2/health/ready", "/v2/models/tiny/ready")
STEP_S = 0.02


def calls(tokens: int, prompt: str = "abc", **more: object) -> dict[str, dict]:
    """A body per HTTP path, each asking for ``tokens`` tokens that no stop cuts short."""
    common = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0, **more}
    text = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": [prompt]}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": prompt}]}
    v2 = {("timeout_seconds" if name == "timeout" else name): value for name, value in common.items()}
    return {
        PREDICT: {"instances": [prompt], "parameters": common},
        INFER: {"inputs": [text], "parameters": v2},
        GENERATE: {"text_input": prompt, "parameters": {**common, "details": True}},
        STREAM: {"text_input": prompt, "parameters": {**common, "details": True}},
        COMPLETION: {"model": "tiny", "prompt": prompt, **common},
        CHAT: {**chat, "stream": True, **common},
    }


def slow(keep):
    return tiny_factory(keep, STEP_S)


def infer_request(tokens: int) -> pb.ModelInferRequest:
    parameters = {"max_tokens": pb.InferParameter(int64_param=tokens), "ignore_eos": pb.InferParameter(bool_param=True)}
    request = pb.ModelInferRequest(model_name="tiny", parameters=parameters)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"abc")
    return request


def events(response: httpx.Response) -> list[dict]:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def counts(url: str) -> dict[str, float]:
    """The counts of one scrape, by name without prefix; fails where they do not add up."""
    found = {}
    for line in httpx.get(url + "/metrics", timeout=5).text.splitlines():
        if line.startswith("carousel_request"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0].removeprefix("carousel_")] = float(value)
    ended = sum(found[f"requests_{name}_total"] for name in ("finished", "cancelled", "failed"))
    assert found["requests_admitted_total"] == ended + found["requests_live"], found
    return found


@pytest.fixture(scope="module")
def paced():
    """A server whose steps take ``STEP_S`` at least."""
    with serving(slow) as running:
        yield running


# --- deadlines


@pytest.mark.parametrize(
    ("path", "how"),
    [*((path, how) for path in calls(1) for how in ("field", "header")), (GENERATE, "both")],
)
def test_a_deadline_ends_a_request_with_what_it_has(paced: Running, path: str, how: str) -> None:
    """vllm#35884: requests that timed out lived on. The shorter of field and header counts."""
    field = {"timeout": 0.2} if how == "field" else {"timeout": 60} if how == "both" else {}
    headers = {"x-request-timeout": "0.2"} if how != "field" else {}
    before = counts(paced.url)["requests_finished_total"]
    started = time.monotonic()
    response = httpx.post(paced.url + path, json=calls(400, **field)[path], headers=headers, timeout=10)
    assert time.monotonic() - started > 0.15
    if path == PREDICT:
        (answer,) = response.json()["predictions"]
        assert (answer["finish_reason"], bool(answer["text"])) == ("timeout", True)
    elif path == INFER:
        found = {output["name"]: output["data"] for output in response.json()["outputs"]}
        assert found["finish_reason"] == ["timeout"]
        assert found["text_output"][0]
    elif path == GENERATE:
        answer = response.json()
        assert (answer["details"]["finish_reason"], bool(answer["text_output"])) == ("timeout", True)
    elif path == STREAM:
        found = events(response)
        assert found[-1]["details"]["finish_reason"] == "timeout"
        assert "".join(event["text_output"] for event in found)
    elif path == COMPLETION:  # OpenAI has no such finish reason
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "request_timeout"
    else:
        found = events(response)
        assert found[-1]["error"]["code"] == "request_timeout"
        assert any(event["choices"][0]["delta"].get("content") for event in found[:-1])
        assert response.text.endswith("data: [DONE]\n\n")
    wait_until(lambda: counts(paced.url)["requests_live"] == 0)
    assert counts(paced.url)["requests_finished_total"] == before + 1


# --- SIGTERM, which is request_stop() in a thread that is not the main one


def check_drain(running: Running, work: list) -> None:
    """Stop while ``work`` (futures) is under way, in steps so long that all of this sees it so: probes, metrics and
    refusals must be right."""
    running.engine.runner.step_s = 1.0
    with httpx.Client(base_url=running.url, timeout=10) as kept:
        kept.get("/livez")
        running.servers[0].request_stop()
        wait_until(lambda: kept.get("/readyz").status_code == 503)
        draining = running.servers[0].lifecycle.engine.draining and not all(future.done() for future in work)
        assert draining, "the drain was over before anything could be seen of it"
        assert httpx.get(running.url + "/livez", timeout=5).status_code == 200  # new connections
        assert "carousel_draining" in httpx.get(running.url + "/metrics", timeout=5).text
        counts(running.url)
        for path, body in calls(1).items():
            refused = httpx.post(running.url + path, json=body, timeout=5)
            assert refused.status_code == 503, path
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]
        with grpc.insecure_channel(running.grpc) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                GRPCInferenceServiceStub(channel).ModelInfer(infer_request(1), timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    running.engine.runner.step_s = 0.0


def results(running: Running, work: list) -> list:
    """What ``work`` brought, once the server has ended well."""
    found = [future.result(60) for future in work]
    running.thread.join(30)
    assert running.codes == [0]
    return found


@pytest.mark.parametrize("moment", ["prefill", "decode", "queue"])
def test_a_stop_lets_everything_admitted_finish(moment: str) -> None:
    """kserve#2144, #3375: REST and gRPC drain side by side, wherever the requests stand."""
    prompt = "x" * 300 if moment == "prefill" else "abc"
    step_s = 0.1 if moment == "prefill" else STEP_S
    seats = 3 if moment == "queue" else 8
    changes = {"drain_seconds": 60.0, "max_batch_sequences": seats}
    with (
        serving(lambda keep: tiny_factory(keep, step_s), **changes) as running,
        grpc.insecure_channel(running.grpc) as channel,
        ThreadPoolExecutor(8) as pool,
    ):
        tokens = 4 if moment == "prefill" else 30
        bodies = calls(tokens, prompt)
        work = [pool.submit(httpx.post, running.url + path, json=body, timeout=60) for path, body in bodies.items()]
        work.append(pool.submit(GRPCInferenceServiceStub(channel).ModelInfer, infer_request(tokens), timeout=60))
        generated = running.engine.stats
        wait_until(lambda: generated().admitted == 7)
        if moment == "decode":
            wait_until(lambda: generated().generation_tokens > 14)
        elif moment == "queue":
            assert generated().num_requests_waiting > 0
        else:
            assert generated().num_tokens_waiting > 300
        check_drain(running, work)
        *http, over_grpc = results(running, work)
        for response in http:
            assert response.status_code == 200
            assert "error" not in response.text
        assert {output.name for output in over_grpc.outputs} >= {"text_output", "finish_reason"}
        last = events(http[list(bodies).index(STREAM)])[-1]
        assert last["details"]["finish_reason"] == "length"
        stats = running.engine.stats()
        assert (stats.admitted, stats.live, sum(stats.finished.values())) == (7, 0, 7)


def test_what_outlasts_the_drain_ends_with_a_clear_error() -> None:
    """kserve#5496, #5485: streams were cut off."""
    with (
        serving(slow, drain_seconds=0.6) as running,
        grpc.insecure_channel(running.grpc) as channel,
        ThreadPoolExecutor(8) as pool,
    ):
        bodies = calls(480)
        work = [pool.submit(httpx.post, running.url + path, json=body, timeout=30) for path, body in bodies.items()]
        call = pool.submit(GRPCInferenceServiceStub(channel).ModelInfer, infer_request(480), timeout=30)
        wait_until(lambda: running.engine.stats().num_requests_running == 7)
        running.servers[0].request_stop()
        for path, response in zip(bodies, results(running, work), strict=True):
            if path in (STREAM, CHAT):
                assert response.status_code == 200
                assert "shut down" in json.dumps(events(response)[-1]["error"])
                assert path == STREAM or response.text.endswith("data: [DONE]\n\n")
            else:
                assert response.status_code == 503
                assert int(response.headers["retry-after"]) >= 1
                assert "shut down" in json.dumps(response.json()["error"])
        assert call.exception(30).code() is grpc.StatusCode.UNAVAILABLE
        assert running.engine.stats().live == 0


# --- the engine dies


def test_an_exception_on_the_engine_thread_fails_what_runs_and_says_why() -> None:
    """kserve#6259, #3957: nobody hangs, everybody hears of it, and liveness goes."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    handler.setFormatter(JsonFormatter())
    with (
        serving(slow) as running,
        grpc.insecure_channel(running.grpc) as channel,
        ThreadPoolExecutor(8) as pool,
    ):
        logging.getLogger().addHandler(handler)
        stub = GRPCInferenceServiceStub(channel)
        bodies = calls(480)
        work = [pool.submit(httpx.post, running.url + path, json=body, timeout=30) for path, body in bodies.items()]
        call = pool.submit(stub.ModelInfer, infer_request(480), timeout=30)
        wait_until(lambda: running.engine.stats().num_requests_running == 7)
        running.engine.runner.fail = RuntimeError("the device fell off the bus")
        for path, future in zip(bodies, work, strict=True):
            response = future.result(10)
            if path in (STREAM, CHAT):
                assert "the engine has failed" in json.dumps(events(response)[-1]["error"])
            else:
                assert response.status_code == 500
                assert "the engine has failed" in json.dumps(response.json()["error"])
        assert call.exception(10).code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)

        assert {path: httpx.get(running.url + path).status_code for path in STATES} == {
            path: 200 if path == "/startupz" else 503 for path in STATES
        }
        assert "fell off the bus" in httpx.get(running.url + "/livez").json()["reason"]
        assert not stub.ServerLive(pb.ServerLiveRequest(), timeout=5).live
        assert not stub.ModelReady(pb.ModelReadyRequest(name="tiny"), timeout=5).ready
        for path, body in calls(1).items():
            refused = httpx.post(running.url + path, json=body, timeout=5)
            assert refused.status_code == 503
            assert "fell off the bus" in refused.text
        now = counts(running.url)
        assert (now["requests_failed_total"], now["requests_live"]) == (7, 0)
        logging.getLogger().removeHandler(handler)
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    assert any("fell off the bus" in line.get("exception", "") for line in lines)


# --- health in every state


def test_probes_while_loading_ready_stuck_and_draining() -> None:
    """kserve#3113, #1915: ready neither before the load nor only after a first request."""
    gate = threading.Event()

    def gated(keep):
        def prepare(engine: FakeEngine) -> None:
            gate.wait(20)
            keep.append(engine)

        return fake_factory(prepare)

    def states(running: Running) -> dict[str, int]:
        return {path: httpx.get(running.url + path, timeout=5).status_code for path in STATES}

    live = {"/livez", "/", "/v2/health/live"}
    with serving(gated, ready=False, drain_seconds=5.0) as running:
        wait_until(lambda: answers(running.url + "/livez"))
        assert states(running) == {path: 200 if path in live else 503 for path in STATES}
        assert httpx.get(running.url + "/startupz").json()["state"] == "loading"
        gate.set()
        wait_until(lambda: answers(running.url + "/readyz"))
        assert set(states(running).values()) == {200}
        running.engine.alive = False
        assert states(running) == {path: 200 if path == "/startupz" else 503 for path in STATES}
        running.engine.alive = True
        running.engine.delay_s = 0.05
        with httpx.stream("POST", running.url + STREAM, json=calls(40)[STREAM], timeout=10) as stream:
            lines = stream.iter_lines()
            next(lines)
            running.servers[0].request_stop()
            wait_until(lambda: httpx.get(running.url + "/readyz").status_code == 503)
            assert states(running) == {path: 200 if path in live | {"/startupz"} else 503 for path in STATES}
            list(lines)


def test_a_step_that_does_not_end_turns_liveness_off_and_its_end_turns_it_on_again() -> None:
    """vllm#22511 is the reverse: a long step within the bound keeps it on."""
    with serving(stall_seconds=2.0) as running, ThreadPoolExecutor(1) as pool:
        running.engine.runner.step_s = 0.25
        one = pool.submit(httpx.post, running.url + GENERATE, json=calls(2)[GENERATE], timeout=30)
        while not one.done():
            assert httpx.get(running.url + "/livez").status_code == 200
        running.engine.runner.step_s = 4.0
        one = pool.submit(httpx.post, running.url + GENERATE, json=calls(1)[GENERATE], timeout=30)
        wait_until(lambda: httpx.get(running.url + "/livez").status_code == 503)
        assert "does not turn" in httpx.get(running.url + "/livez").json()["reason"]
        assert one.result(30).status_code == 200
        wait_until(lambda: answers(running.url + "/readyz"))
