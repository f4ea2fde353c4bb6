"""Wrong settings in an InferenceService: refused with a message that names them, or named in its status."""

from __future__ import annotations

import pytest
from tests.cluster.e2e.conftest import container_of, demo_service
from tests.cluster.e2e.kube import Kube, KubectlError, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def failure(kube: Kube) -> str:
    """What the status says of the last failure."""

    def said() -> str | None:
        status = kube.get("inferenceservice", "smollm2").get("status", {})
        return status.get("modelStatus", {}).get("lastFailureInfo", {}).get("message")

    return until(said, 150, lambda: f"a failure in the status\n{kube.story('smollm2')}")


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"CAROUSEL_MODEL": "HuggingFaceTB/SmolLM2"}, ("CAROUSEL_MODEL", "hf://HuggingFaceTB/SmolLM2")),
        ({"CAROUSEL_POLICY": "fairest"}, ("CAROUSEL_POLICY", "fairest", "fcfs")),
        ({"CAROUSEL_MAX_BATCH_TOKEN": "64"}, ("CAROUSEL_MAX_BATCH_TOKEN", "CAROUSEL_MAX_BATCH_TOKENS")),
        ({"CAROUSEL_API_KEYS": "/etc/keys"}, ("CAROUSEL_API_KEYS", "/etc/keys")),
        ({"CAROUSEL_DEVICE": "cuda"}, ("cuda",)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_the_status_names_the_setting(kube: Kube, variables: dict[str, str], named: tuple[str, ...]) -> None:
    kube.apply(demo_service(**variables))
    said = failure(kube)
    assert [text for text in named if text not in said] == [], said


@pytest.mark.parametrize("wrong", ["minReplicas", "port", "resources"])
def test_the_api_refuses_what_the_schema_knows(kube: Kube, wrong: str) -> None:
    service = demo_service()
    if wrong == "minReplicas":
        service["spec"]["predictor"]["minReplicas"] = "two"
    elif wrong == "port":
        container_of(service)["ports"][0]["containerPort"] = "http"
    else:
        container_of(service)["resources"]["limits"]["memory"] = "much"
    with pytest.raises(KubectlError) as caught:
        kube.apply(service)
    assert {"minReplicas": "minReplicas", "port": "containerPort", "resources": "memory"}[wrong] in str(caught.value)
