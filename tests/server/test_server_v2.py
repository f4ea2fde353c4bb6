"""V2 over REST and gRPC with Triton's and KServe's own clients."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest, RESTConfig

from carousel.engine.errors import EngineUnavailable, QueueFull

TEXT = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["hello"]}


def texts(values) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else value for value in np.asarray(values).reshape(-1).tolist()]


# REST, Triton's client


@pytest.fixture
def triton_client(server):
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    yield client
    client.close()


def triton_input(*prompts: str, binary: bool) -> triton.InferInput:
    tensor = triton.InferInput("text_input", [len(prompts)], "BYTES")
    tensor.set_data_from_numpy(np.array([prompt.encode() for prompt in prompts], dtype=object), binary_data=binary)
    return tensor


def test_triton_health_and_metadata(triton_client):
    assert triton_client.is_server_live()
    assert triton_client.is_server_ready()
    assert triton_client.is_model_ready("fake")
    assert triton_client.is_model_ready("fake", "1")
    assert triton_client.get_server_metadata()["name"] == "carousel"
    for version in ("", "1"):
        metadata = triton_client.get_model_metadata("fake", version)
        assert metadata["versions"] == ["1"]
        assert "text_input" in [tensor["name"] for tensor in metadata["inputs"]]
        assert "text_output" in [tensor["name"] for tensor in metadata["outputs"]]


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_triton_infer_with_and_without_binary_tensors(triton_client, binary_in, binary_out):
    result = triton_client.infer(
        "fake",
        [triton_input("a", "bcd", binary=binary_in)],
        outputs=[triton.InferRequestedOutput("text_output", binary_data=binary_out)],
        parameters={"max_tokens": 2},
        request_id="my id",
    )
    assert texts(result.as_numpy("text_output")) == ["w0 w1 ", "w0 w1 "]
    response = result.get_response()
    assert response["id"] == "my id"
    assert response["model_version"] == "1"
    parameters = result.get_output("text_output").get("parameters") or {}
    assert ("binary_data_size" in parameters) == binary_out


def test_triton_infer_of_all_outputs_and_a_version(triton_client):
    result = triton_client.infer("fake", [triton_input("a", binary=True)], model_version="1")
    assert texts(result.as_numpy("text_output")) != []
    assert texts(result.as_numpy("finish_reason")) == ["length"]


def test_triton_unknown_version_is_404(triton_client):
    with pytest.raises(triton.InferenceServerException, match="versions"):
        triton_client.infer("fake", [triton_input("a", binary=True)], model_version="7")


# REST, KServe's client and plain bodies


async def test_kserve_rest_client(server):
    client = InferenceRESTClient(RESTConfig(protocol="v2"))
    request = InferRequest("fake", [InferInput("text_input", [2], "BYTES", ["a", "b"])], parameters={"max_tokens": 1})
    response = await client.infer(server.url, request, model_name="fake")
    outputs = {output.name: output.data for output in response.outputs}
    assert outputs["text_output"] == ["w0 ", "w0 "]
    assert await client.is_server_ready(server.url)
    assert await client.is_model_ready(server.url, "fake")
    await client.close()


async def test_kserve_rest_client_v1(server):
    client = InferenceRESTClient(RESTConfig(protocol="v1"))
    response = await client.infer(
        server.url, {"instances": ["a"], "parameters": {"max_tokens": 2}}, model_name="fake", headers={}
    )
    assert "w0 w1 " in json.dumps(response)
    await client.close()


@pytest.mark.parametrize("given", [{}, {"id": None}])
def test_a_missing_or_null_id_is_made_up(client, given):
    """kserve#2944, #3094: a request without an id was answered with 500."""
    response = client.post("/v2/models/fake/infer", json={"inputs": [TEXT], **given})
    assert response.status_code == 200
    assert len(response.json()["id"]) > 8


def test_lists_in_parameters_are_taken(client):
    body = {"inputs": [TEXT], "parameters": {"stop": ["x", "y"], "max_tokens": 1}}
    assert client.post("/v2/models/fake/infer", json=body).status_code == 200


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "body"),
        (b"[]", "body"),
        (b'{"inputs": NaN}', "body"),
        (b"\xff", "body"),
        (b"{}", "inputs"),
        (b'{"inputs": [7]}', "inputs[0]"),
        (b'{"inputs": [{"name": 7}]}', "inputs[0].name"),
        (json.dumps({"inputs": [{**TEXT, "shape": "x"}]}).encode(), "inputs[0].shape"),
        (json.dumps({"inputs": [{**TEXT, "shape": [-1]}]}).encode(), "inputs[0].shape"),
        (json.dumps({"inputs": [{**TEXT, "shape": [5]}]}).encode(), "inputs[0]."),
        (json.dumps({"inputs": [{**TEXT, "datatype": "FP32"}]}).encode(), "inputs[0].data"),
        (json.dumps({"inputs": [{**TEXT, "data": None}]}).encode(), "inputs[0].data"),
        (json.dumps({"inputs": [TEXT], "parameters": 3}).encode(), "parameters"),
        (json.dumps({"inputs": [TEXT], "parameters": {"temperature": -1}}).encode(), "temperature"),
        (json.dumps({"inputs": [TEXT], "id": 3}).encode(), "id"),
        (json.dumps({"inputs": [{**TEXT, "data": None, "parameters": {"binary_data_size": 3}}]}).encode(), "inputs[0]"),
    ],
)
def test_a_bad_body_is_400_and_names_the_field(client, body, named):
    response = client.post("/v2/models/fake/infer", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]


@pytest.mark.parametrize(
    ("tail", "size"), [(b"", 9), (b"\x09\x00\x00\x00abc", 7), (b"\xff\xff\xff\xff", 4), (b"abc", 3), (b"abcd", 1)]
)
def test_a_bad_binary_tensor_is_400(client, tail, size):
    item = {"name": "text_input", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": size}}
    head = json.dumps({"inputs": [item]}).encode()
    headers = {"content-type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))}
    response = client.post("/v2/models/fake/infer", content=head + tail, headers=headers)
    assert response.status_code == 400, response.text
    assert "error" in response.json()


@pytest.mark.parametrize("length", ["-1", "x", "99999", "", "²"])
def test_a_bad_binary_header_is_400(client, length):
    headers = {"content-type": "application/octet-stream", "Inference-Header-Content-Length": length.encode()}
    response = client.post("/v2/models/fake/infer", content=b"{}", headers=headers)
    assert response.status_code == 400, response.text


def test_overload_and_drain_over_rest(server, client):
    server.engine.refuse = QueueFull("full", 2)
    response = client.post("/v2/models/fake/infer", json={"inputs": [TEXT]})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")
    assert response.json() == {"error": "full"}
    server.engine.refuse = EngineUnavailable("draining", 4)
    response = client.post("/v2/models/fake/infer", json={"inputs": [TEXT]})
    assert (response.status_code, response.headers["retry-after"]) == (503, "4")


# gRPC, KServe's client


@pytest.fixture
async def grpc_client(server):
    client = InferenceGRPCClient(server.grpc, retries=0)
    yield client
    await client.close()


def grpc_request(*prompts: str, **parameters) -> InferRequest:
    tensor = InferInput("text_input", [len(prompts)], "BYTES", [prompt.encode() for prompt in prompts])
    return InferRequest("fake", [tensor], parameters=parameters or None)


async def test_kserve_grpc_client(grpc_client):
    """kserve#2692: gRPC parameters were lost. kserve#3465: model_version was missing."""
    assert await grpc_client.is_server_live()
    assert await grpc_client.is_server_ready()
    assert await grpc_client.is_model_ready("fake")
    response = await grpc_client.infer(grpc_request("a", "b", max_tokens=2))
    outputs = {output.name: output for output in response.outputs}
    assert texts(outputs["text_output"].as_numpy()) == ["w0 w1 ", "w0 w1 "]
    assert response.model_version == "1"
    assert len(response.id) > 8


@pytest.mark.parametrize(
    ("error", "code", "seconds"),
    [
        (QueueFull("full", 2.5), grpc.StatusCode.RESOURCE_EXHAUSTED, "3"),
        (EngineUnavailable("draining", 4), grpc.StatusCode.UNAVAILABLE, "4"),
    ],
)
async def test_grpc_overload_and_drain(server, grpc_client, error, code, seconds):
    server.engine.refuse = error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await grpc_client.infer(grpc_request("a"))
    assert caught.value.code() is code
    assert dict(caught.value.trailing_metadata())["retry-after"] == seconds


async def test_grpc_bad_input(grpc_client):
    for request, named in (
        (grpc_request("a", max_tokens=-1), "max_tokens"),
        (InferRequest("fake", [InferInput("other", [1], "BYTES", [b"a"])]), "text_input"),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await grpc_client.infer(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert named in caught.value.details()
    unknown = InferRequest("other", [InferInput("text_input", [1], "BYTES", [b"a"])])
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await grpc_client.infer(unknown)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


# gRPC, Triton's client: in a process of its own, for its copy of the protocol and KServe's refuse to share one


def test_triton_grpc_client(server):
    script = Path(__file__).parent / "triton_grpc_client.py"
    done = subprocess.run(
        [sys.executable, str(script), server.grpc],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads(done.stdout)
    assert (results["live"], results["ready"], results["model_ready"]) == (True, True, True)
    assert results["texts"] == ["w0 w1 ", "w0 w1 "]
    assert results["id"] == "my id"
    assert results["temperature_error"].startswith("[StatusCode.INVALID_ARGUMENT]")
    assert "temperature" in results["temperature_error"]
    assert results["versions"] == ["1"]
    assert results["unload_error"].startswith("[StatusCode.PERMISSION_DENIED]")


def test_probes_are_not_slowed_by_the_batch(server, client):
    server.engine.delay_s = 0.05
    with httpx.stream(
        "POST", server.url + "/v2/models/fake/generate_stream", json={"text_input": "a"}, timeout=10
    ) as stream:
        assert client.get("/livez").status_code == 200
        assert server.engine.stats().num_requests_running == 1, "the probe was answered after the stream"
        stream.read()
