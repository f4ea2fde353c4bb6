"""Conformance: KServe's own clients, V1 and V2, and Triton's over HTTP, sync and asyncio, on a real (tiny) engine."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig
from tests.ports import free_port
from tests.server.harness import wait_until
from tests.server.tiny_server import MODEL, TinyServer, tiny_server

PROMPTS = ["abc", "hé", "xyz"]
PARAMETERS = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
PREDICT = f"/v1/models/{MODEL}:predict"


@pytest.fixture(scope="module")
def tiny() -> Iterator[TinyServer]:
    with tiny_server(grpc=True, grpc_port=free_port()) as server:
        yield server


@pytest.fixture(scope="module")
def expected(tiny) -> list[str]:
    """What the model says to each prompt, alone."""
    answers = []
    for prompt in PROMPTS:
        body = {"text_input": prompt, "parameters": PARAMETERS}
        answers.append(httpx.post(f"{tiny.url}/v2/models/{MODEL}/generate", json=body).json()["text_output"])
    return answers


@pytest.fixture
def client(tiny) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=tiny.url, timeout=30) as client:
        yield client


# KServe's REST client


async def test_kserve_v1(tiny, expected):
    client = InferenceRESTClient(RESTConfig(protocol="v1"))
    assert await client.is_server_live(tiny.url)
    assert await client.is_model_ready(tiny.url, MODEL)
    body = {"instances": PROMPTS, "parameters": PARAMETERS}
    answer = await client.infer(tiny.url, body, model_name=MODEL)
    assert [item["text"] for item in answer["predictions"]] == expected
    assert [item["usage"]["completion_tokens"] for item in answer["predictions"]] == [6, 6, 6]
    with pytest.raises(httpx.HTTPStatusError, match="temperature"):
        await client.infer(tiny.url, {**body, "parameters": {"temperature": -1}}, model_name=MODEL)
    with pytest.raises(httpx.HTTPStatusError, match="not served here"):
        await client.is_model_ready(tiny.url, "other")
    with pytest.raises(httpx.HTTPStatusError, match="501"):
        await client.explain(tiny.url, MODEL, body)
    await client.close()


@pytest.mark.parametrize("binary", [False, True])
async def test_kserve_v2(tiny, expected, binary):
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    assert await client.is_server_live(tiny.url)
    assert await client.is_server_ready(tiny.url)
    assert await client.is_model_ready(tiny.url, MODEL)
    tensor = InferInput("text_input", [3], "BYTES")
    tensor.set_data_from_numpy(np.array([p.encode() for p in PROMPTS], dtype=object), binary_data=binary)
    answer = await client.infer(tiny.url, InferRequest(MODEL, [tensor], parameters=dict(PARAMETERS)), model_name=MODEL)
    outputs = {output.name: output.as_numpy().reshape(-1).tolist() for output in answer.outputs}
    assert outputs["text_output"] == expected
    assert outputs["completion_tokens"] == [6, 6, 6]
    await client.close()


async def test_kserve_grpc(tiny, expected):
    """kserve#3465: model_version was missing. (The REST client loses it, whatever the answer says.)"""
    client = InferenceGRPCClient(f"127.0.0.1:{tiny.settings.grpc_port}", retries=0)
    assert await client.is_server_live()
    assert await client.is_server_ready()
    assert await client.is_model_ready(MODEL)
    tensor = InferInput("text_input", [3, 1], "BYTES", [prompt.encode() for prompt in PROMPTS])
    request = InferRequest(MODEL, [tensor], parameters={**PARAMETERS, "temperature": "0"}, request_id="my id")
    answer = await client.infer(request)
    outputs = {output.name: output.as_numpy().reshape(-1).tolist() for output in answer.outputs}
    assert [text.decode() if isinstance(text, bytes) else text for text in outputs["text_output"]] == expected
    assert answer.id == "my id"
    assert answer.model_version == "1"
    await client.close()


# Triton's HTTP clients


def inputs(module, binary: bool) -> list:
    tensor = module.InferInput("text_input", [3], "BYTES")
    tensor.set_data_from_numpy(np.array([p.encode() for p in PROMPTS], dtype=object), binary_data=binary)
    lengths = module.InferInput("max_tokens", [3, 1], "INT32")
    lengths.set_data_from_numpy(np.array([[6], [6], [2]], dtype=np.int32), binary_data=binary)
    return [tensor, lengths]


def check(result, expected: list[str]) -> None:
    texts = [t.decode() if isinstance(t, bytes) else t for t in result.as_numpy("text_output").reshape(-1).tolist()]
    assert texts[:2] == expected[:2]
    assert expected[2].startswith(texts[2])
    assert result.as_numpy("completion_tokens").tolist() == [6, 6, 2]
    assert result.as_numpy("finish_reason").reshape(-1).tolist() in ([b"length"] * 3, ["length"] * 3)


PLAIN = {"temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True, None])
@pytest.mark.parametrize("version", ["", "1"])
def test_triton_infer(tiny, expected, binary_in, binary_out, version):
    names = ("text_output", "completion_tokens", "finish_reason")
    outputs = None if binary_out is None else [triton.InferRequestedOutput(n, binary_data=binary_out) for n in names]
    with triton.InferenceServerClient(tiny.url.removeprefix("http://")) as client:
        result = client.infer(
            MODEL, inputs(triton, binary_in), model_version=version, outputs=outputs, request_id="7", parameters=PLAIN
        )
        check(result, expected)
        assert result.get_response()["id"] == "7"
        later = client.async_infer(MODEL, inputs(triton, binary_in), outputs=outputs, parameters=PLAIN)
        check(later.get_result(timeout=10), expected)


def test_triton_statistics(tiny):
    with triton.InferenceServerClient(tiny.url.removeprefix("http://")) as client:
        (before,) = client.get_inference_statistics(MODEL, "1")["model_stats"]
        client.infer(MODEL, inputs(triton, True), parameters=PLAIN)
        (after,) = client.get_inference_statistics()["model_stats"]
    assert (after["name"], after["version"]) == (MODEL, "1")
    earlier, later = before["inference_stats"], after["inference_stats"]
    grown = {
        kind: (later[kind]["count"] - earlier[kind]["count"], later[kind]["ns"] > earlier[kind]["ns"]) for kind in later
    }
    rows = after["inference_count"] - before["inference_count"]
    assert rows == len(PROMPTS)  # each row of the batch is a request of the engine
    for kind in ("success", "queue", "compute_input", "compute_infer"):
        assert grown[kind] == (rows, True)
    assert grown["fail"] == (0, False)
    assert grown["cache_hit"][0] + grown["cache_miss"][0] == rows
    assert after["execution_count"] > before["execution_count"]
    assert after["last_inference"] >= before["last_inference"]


def test_triton_asks_for_everything_that_the_protocol_has(tiny):
    with triton.InferenceServerClient(tiny.url.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        server = client.get_server_metadata()
        assert {"name", "version", "extensions"} == set(server)
        assert {"binary_tensor_data", "generate", "model_configuration"} <= set(server["extensions"])
        assert client.get_model_repository_index() == [{"name": MODEL, "version": "1", "state": "READY", "reason": ""}]
        client.load_model(MODEL)
        for version in ("", "1"):
            assert client.is_model_ready(MODEL, version)
            metadata = client.get_model_metadata(MODEL, version)
            assert set(metadata) == {"name", "versions", "platform", "inputs", "outputs"}
            config = client.get_model_config(MODEL, version)
            assert config["input"] == [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [-1]}]
            assert [item["name"] for item in config["output"]] == [item["name"] for item in metadata["outputs"]]
            assert {item["data_type"] for item in config["output"]} == {"TYPE_STRING", "TYPE_INT32"}
        for ask in (client.get_model_metadata, client.get_model_config, client.get_inference_statistics):
            with pytest.raises(triton.InferenceServerException, match="versions/7"):
                ask(MODEL, "7")
        assert not client.is_model_ready(MODEL, "7")
        with pytest.raises(triton.InferenceServerException, match="allow-unload"):
            client.unload_model(MODEL)
        with pytest.raises(triton.InferenceServerException, match="generate_stream"):
            client.infer(MODEL, inputs(triton, True), parameters={"stream": True})


@pytest.mark.parametrize("binary", [False, True])
async def test_triton_asyncio(tiny, expected, binary):
    async with triton_aio.InferenceServerClient(tiny.url.removeprefix("http://")) as client:
        assert await client.is_server_live()
        assert await client.is_model_ready(MODEL, "1")
        check(await client.infer(MODEL, inputs(triton_aio, binary), parameters=PLAIN), expected)
        with pytest.raises(triton_aio.InferenceServerException, match="temperature"):
            await client.infer(MODEL, inputs(triton_aio, binary), parameters={"temperature": -1})


# Plain HTTP: what no client has


def events(response: httpx.Response) -> list:
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_v1_streams(client, expected):
    body = {"instances": PROMPTS, "parameters": PARAMETERS, "stream": True}
    response = client.post(PREDICT, json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    received = events(response)
    assert received[-1] == "[DONE]"
    texts = dict.fromkeys(range(3), "")
    usage = {}
    for event in received[:-1]:
        (piece,) = event["predictions"]
        texts[piece["index"]] += piece["text"]
        usage |= {piece["index"]: piece["usage"]["completion_tokens"]} if "usage" in piece else {}
    assert list(texts.values()) == expected
    assert usage == {0: 6, 1: 6, 2: 6}
    refused = client.post(PREDICT, json={**body, "parameters": {"top_p": 7}})
    assert (refused.status_code, refused.headers["content-type"]) == (400, "application/json")


@pytest.mark.parametrize("structured", [False, True])
def test_v1_takes_cloud_events(client, expected, structured):
    data = {"instances": ["abc"], "parameters": PARAMETERS}
    attributes = {"specversion": "1.0", "id": "36", "source": "test", "type": "ask"}
    if structured:
        headers = {"content-type": "application/cloudevents+json"}
        response = client.post(PREDICT, headers=headers, content=json.dumps({**attributes, "data": data}))
        answer = response.json()
        assert answer["specversion"] == "1.0"
        predictions = answer["data"]["predictions"]
    else:
        headers = {f"ce-{name}": value for name, value in attributes.items()}
        response = client.post(PREDICT, headers=headers, json=data)
        assert response.headers["ce-specversion"] == "1.0"
        predictions = response.json()["predictions"]
    assert response.status_code == 200
    assert predictions[0]["text"] == expected[0]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"content-type": "application/cloudevents+json"}, {"specversion": "1.0", "id": "1"}),
        ({"content-type": "application/cloudevents+json"}, []),
        ({"ce-specversion": "9", "ce-id": "1", "ce-source": "x", "ce-type": "y"}, {"instances": ["a"]}),
        ({"ce-specversion": "1.0", "ce-id": "1", "ce-source": "x", "ce-type": "y"}, {"instances": 3}),
        ({"ce-specversion": "1.0", "ce-id": "1", "ce-source": "x", "ce-type": "y"}, {"instances": [], "stream": True}),
    ],
)
def test_a_bad_cloud_event_is_400(client, headers, body):
    response = client.post(PREDICT, headers=headers, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]


def test_one_models_body_serves_both_protocols(client):
    for path in ("/v1/models", "/openai/v1/models"):
        body = client.get(path).json()
        assert body["models"] == [MODEL]
        assert (body["object"], body["data"][0]["id"], body["data"][0]["max_model_len"]) == ("list", MODEL, 512)
        card = client.get(f"{path}/{MODEL}").json()
        assert (card["name"], card["ready"], card["id"], card["object"]) == (MODEL, True, MODEL, "model")
        assert client.get(f"{path}/other").status_code == 404


def test_health_load_and_version_as_vllm_has_them(client):
    health = client.get("/health")
    assert (health.status_code, health.content) == (200, b"")
    load = client.get("/load").json()
    assert (load["server_load"], load["tokens_waiting"], load["ready"], load["draining"]) == (0, 0, True, False)
    assert load["sequence_slots"] == 8
    assert client.get("/version").json()["version"]


def test_load_counts_what_runs(server):
    server.engine.delay_s = 0.05
    body = {"text_input": "abc", "parameters": {"max_tokens": 100}}
    with (
        httpx.Client(base_url=server.url) as client,
        client.stream("POST", "/v2/models/fake/generate_stream", json=body) as stream,
    ):
        lines = stream.iter_lines()  # kept: its end would close the stream
        next(lines)
        load = client.get("/load").json()
    assert load["server_load"] == load["requests_running"] == 1
    wait_until(lambda: not server.engine.live)


@pytest.mark.parametrize(("body", "entries"), [(None, 1), ({}, 1), ({"ready": True}, 1), ({"ready": False}, 1)])
def test_the_repository_index(client, body, entries):
    assert len(client.post("/v2/repository/index", json=body).json()) == entries
    assert client.post("/v2/repository/index", json={"ready": 1}).status_code == 400


def test_every_path_of_a_model_has_its_version(client):
    for path in ("", "/ready", "/config"):
        assert (
            client.get(f"/v2/models/{MODEL}/versions/1{path}").json() == client.get(f"/v2/models/{MODEL}{path}").json()
        )
        assert client.get(f"/v2/models/{MODEL}/versions/2{path}").status_code == 404
    tensor = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a"]}
    for path, body in (
        ("infer", {"inputs": [tensor]}),
        ("generate", {"text_input": "a"}),
        ("generate_stream", {"text_input": "a"}),
    ):
        assert client.post(f"/v2/models/{MODEL}/versions/1/{path}", json=body).status_code == 200
        assert client.post(f"/v2/models/{MODEL}/versions/2/{path}", json=body).status_code == 404
