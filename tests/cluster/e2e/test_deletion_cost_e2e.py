"""The overlay deletion-cost: a token and the right to patch pods, and no more; a scale-in takes the idlest pod."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest
from tests.cluster.e2e.conftest import IMAGE, container_of, set_variables
from tests.cluster.e2e.kube import Kube, Object, name_of, until
from tests.manifests.kustomized import MANIFESTS, build

pytestmark = pytest.mark.timeout(600)
COST = "controller.kubernetes.io/pod-deletion-cost"
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"


def objects(replicas: int) -> list[Object]:
    """The overlay with so many replicas, the demo image, and steps that last so that a stream does."""
    found = build(MANIFESTS / "overlays" / "deletion-cost")
    (service,) = [item for item in found if item["kind"] == "InferenceService"]
    service["spec"]["predictor"]["minReplicas"] = replicas
    container = container_of(service)
    container["image"] = IMAGE
    container["resources"]["requests"] = {"cpu": "50m", "memory": "1Gi"}
    container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] != "cache"]
    set_variables(service, CAROUSEL_MODEL_NAME="smollm2", CAROUSEL_FAULTS="slow=0.3", CAROUSEL_DRAIN_SECONDS="60")
    return found


@contextmanager
def stream_to(kube: Kube, pod: str, tokens: int) -> Iterator[None]:
    """One long stream to this pod, which has begun; the client leaves at the end of the context."""
    body = {"text_input": "Once upon a time", "parameters": {"max_tokens": tokens, "ignore_eos": True}}
    with kube.forward(f"pod/{pod}", 8080) as port:
        url = f"http://127.0.0.1:{port}/v2/models/smollm2/generate_stream"
        with httpx.stream("POST", url, json=body, timeout=60) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())
            yield  # the rest fits the buffers on the way


def costs(kube: Kube) -> dict[str, int]:
    return {name_of(pod): int(pod["metadata"].get("annotations", {}).get(COST, -1)) for pod in kube.pods("carousel")}


def allowed(kube: Kube, *words: str) -> bool:
    account = f"system:serviceaccount:{kube.namespace}:carousel"
    return kube.run("auth", "can-i", *words, "--as", account, check=False).strip() == "yes"


def test_the_idlest_pod_goes_though_it_is_the_oldest(kube: Kube, report: Callable[..., None]) -> None:
    kube.apply(*objects(1))
    (oldest,) = (name_of(pod) for pod in kube.wait_pods("carousel", 1, 300))
    kube.apply(*objects(3))
    busy = {name_of(pod) for pod in kube.wait_pods("carousel", 3, 300)} - {oldest}

    # A token is there, and it opens nothing but what the Role says.
    assert kube.exec(oldest, "cat", TOKEN)
    assert allowed(kube, "patch", "pods")
    refused = [("list", "pods"), ("get", "pods"), ("delete", "pods"), ("get", "secrets"), ("patch", "deployments.apps")]
    assert [words for words in refused if allowed(kube, *words)] == []

    with ExitStack() as streams:
        for pod in busy:
            streams.enter_context(stream_to(kube, pod, 600))
        until(
            lambda: costs(kube)[oldest] == 0 and all(costs(kube)[pod] > 0 for pod in busy),
            60,
            lambda: f"costs: {json.dumps(costs(kube))}\n{kube.story('carousel')}",
        )
        seen = costs(kube)
        kube.apply(*objects(2))
        left = {name_of(pod) for pod in kube.wait_pods("carousel", 2, 200)}
    report(costs=sorted(seen.values()), the_idle_one_went=left == busy)
    # Of pods that cost the same the youngest goes; here it was the oldest, which had nothing to do.
    assert left == busy
