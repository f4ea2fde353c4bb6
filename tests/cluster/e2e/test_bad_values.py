"""Wrong settings in an InferenceService: refused with a message that names them, or named in its status."""

from __future__ import annotations

import pytest
from tests.cluster.e2e.conftest import container_of, demo_service
from tests.cluster.e2e.kube import Kube, KubectlError, name_of, until

from carousel.config import declared_settings, load_settings
from carousel.options import SettingsError

pytestmark = pytest.mark.timeout(300)


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


def test_every_setting_that_is_wrong_is_named_at_once(kube: Kube) -> None:
    """All of them wrong in one InferenceService: the log of the container that ended names each, and its value."""
    wrong = {item.env: "bad!" for item in declared_settings()}
    with pytest.raises(SettingsError) as refused:
        load_settings([], wrong)
    named = {name for problem in refused.value.problems for name in problem.names}
    assert {item.name for item in declared_settings()} - named <= {"cache_dir", "usage_log", "service_account_audience"}
    service = demo_service()
    variables = container_of(service)["env"]
    variables[:] = [{"name": name, "value": value} for name, value in wrong.items()]
    kube.apply(service)
    assert "bad!" in failure(kube)
    (pod,) = kube.pods("smollm2")

    def last_words() -> str | None:
        """Of the container that ended, or of the next one: either may be gone, or not have begun, at this moment."""
        logs = (kube.run("logs", name_of(pod), *words, check=False) for words in ((), ("--previous",)))
        return next((log for log in logs if "bad!" in log), None)

    said = until(last_words, 60, lambda: f"a log that names the settings\n{kube.story('smollm2')}")
    lines = said.splitlines()
    for item in declared_settings():
        if item.name in named:
            assert any(item.env in line and "bad!" in line for line in lines), f"{item.env} is not named in\n{said}"


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
