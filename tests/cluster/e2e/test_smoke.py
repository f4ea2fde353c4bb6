"""Apply -> ready -> an answer on every protocol -> more and fewer replicas. The part that CI runs."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import grpc
import httpx
import pytest
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tests.cluster.e2e.conftest import demo_service
from tests.cluster.e2e.kube import Kube, Object, name_of, until

pytestmark = pytest.mark.timeout(400)
PROMPT = "The capital of France is"


def seconds_between(begin: str, end: str) -> float:
    first, last = (datetime.datetime.fromisoformat(text) for text in (begin, end))
    return (last - first).total_seconds()


def start_of(pod: Object) -> tuple[float, float]:
    """Seconds from the pod's creation, and from its container's start, until it was ready; whole ones."""
    ready = next(item for item in pod["status"]["conditions"] if item["type"] == "Ready")["lastTransitionTime"]
    running = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    return seconds_between(pod["metadata"]["creationTimestamp"], ready), seconds_between(running, ready)


def rest_answers(url: str) -> dict[str, str]:
    """What every HTTP protocol says to the prompt, greedily."""
    greedy = {"max_tokens": 4, "temperature": 0}
    with httpx.Client(base_url=url, timeout=60) as client:

        def post(path: str, body: dict[str, Any]) -> Any:
            answer = client.post(path, json=body)
            assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
            return answer

        generate = {"text_input": PROMPT, "parameters": greedy}
        inputs = [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": [PROMPT]}]
        outputs = post("/v2/models/smollm2/infer", {"inputs": inputs, "parameters": greedy}).json()["outputs"]
        texts = {
            "generate": post("/v2/models/smollm2/generate", generate).json()["text_output"],
            "infer": next(item["data"][0] for item in outputs if item["name"] == "text_output"),
        }
        streamed = post("/v2/models/smollm2/generate_stream", generate).text
        events = [
            json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line.startswith("data: ")
        ]
        texts["generate_stream"] = "".join(event["text_output"] for event in events)
        v1 = post("/v1/models/smollm2:predict", {"instances": [PROMPT], "parameters": greedy}).json()
        texts["predict"] = json.dumps(v1)
        openai = {"model": "smollm2", "prompt": PROMPT, **greedy}
        texts["completions"] = post("/openai/v1/completions", openai).json()["choices"][0]["text"]
        chat = {"model": "smollm2", "messages": [{"role": "user", "content": PROMPT}], "stream": True, **greedy}
        assert post("/openai/v1/chat/completions", chat).text.rstrip().endswith("data: [DONE]")
        assert "carousel_ready" in client.get("/metrics").text
    return texts


def grpc_answer(port: int) -> str:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        request = pb.ModelInferRequest(model_name="smollm2")
        tensor = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(PROMPT.encode())
        request.parameters["max_tokens"].int64_param = 4
        request.parameters["temperature"].int64_param = 0
        response = GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=60)
    index = next(index for index, output in enumerate(response.outputs) if output.name == "text_output")
    if response.raw_output_contents:
        return response.raw_output_contents[index][4:].decode()
    return response.outputs[index].contents.bytes_contents[0].decode()


def all_protocols_answer(kube: Kube, service: str) -> None:
    """V1, V2 over REST, SSE and gRPC, and OpenAI's API, through port-forward. They ask one engine the same, and it says
    the same."""
    with kube.forward(service, 80) as port:
        texts = rest_answers(f"http://127.0.0.1:{port}")
    with kube.forward(service, 8081) as port:
        texts["grpc"] = grpc_answer(port)
    assert "Paris" in texts["generate"]
    assert {texts[name] for name in ("infer", "generate_stream", "completions", "grpc")} == {texts["generate"]}
    assert "Paris" in texts["predict"]


@pytest.mark.smoke
def test_apply_ready_answers_and_replicas(kube: Kube, report: Callable[..., None]) -> None:
    kube.apply(demo_service(CAROUSEL_SHUTDOWN_DELAY_SECONDS="1"))
    kube.wait_ready("smollm2")
    (pod,) = kube.wait_pods("smollm2", 1)
    created, started = start_of(pod)
    log = kube.logs(name_of(pod))
    ready_line = next(json.loads(line)["message"] for line in log.splitlines() if '"ready in ' in line)
    report(ready_after_creation_s=created, ready_after_container_start_s=started, said=ready_line)

    all_protocols_answer(kube, "service/smollm2-predictor")
    confined(kube, name_of(pod))
    for replicas in (2, 1):
        kube.apply(demo_service(replicas=replicas, CAROUSEL_SHUTDOWN_DELAY_SECONDS="1"))
        kube.wait_pods("smollm2", replicas)
    assert kube.condition("inferenceservice", "smollm2")["status"] == "True"


def confined(kube: Kube, pod: str) -> None:
    """Uid 1000, nothing to write to but /tmp, no capabilities, no token of a service account."""
    assert kube.exec(pod, "id", "-u").strip() == "1000"
    assert "Read-only file system" in kube.exec(pod, "touch", "/opt/venv/x", "/x", check=False)
    kube.exec(pod, "touch", "/tmp/x")
    assert "No such file" in kube.exec(pod, "ls", "/var/run/secrets/kubernetes.io", check=False)
    status = dict(line.split(":", 1) for line in kube.exec(pod, "cat", "/proc/1/status").splitlines() if ":" in line)
    assert int(status["CapEff"], 16) == int(status["CapBnd"], 16) == 0
    assert status["NoNewPrivs"].strip() == "1"
    assert status["Seccomp"].strip() == "2"
    command = kube.exec(pod, "cat", "/proc/1/cmdline").split("\0")
    assert command[1].endswith("/carousel"), f"process 1 is {command}, not the server"


@pytest.mark.smoke
def test_a_wrong_setting_is_named_in_the_status(kube: Kube) -> None:
    """Never a crash loop without a reason: KServe shows what the container said last."""
    kube.apply(demo_service(CAROUSEL_MAX_BATCH_TOKENS="many"))

    def failure() -> str | None:
        status = kube.get("inferenceservice", "smollm2").get("status", {})
        return status.get("modelStatus", {}).get("lastFailureInfo", {}).get("message")

    said = until(failure, 120, lambda: f"a failure in the status\n{kube.story('smollm2')}")
    assert "CAROUSEL_MAX_BATCH_TOKENS" in said
    assert "many" in said
