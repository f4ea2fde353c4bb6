"""The load test in the cluster: the chart's Job against the release, whose exit code tells missed objectives."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from tests.cluster.e2e.kube import Kube, Object, name_of, until
from tests.cluster.e2e.test_helm import SMALL, helm, story, wait_pods
from tests.helm.chart_tools import CHART, Doc, merged

pytestmark = pytest.mark.timeout(600)

IMAGE = os.environ.get("CAROUSEL_E2E_LOAD_IMAGE", "")


def with_load(*slos: str) -> Doc:
    repository, _, tag = IMAGE.rpartition(":")
    load = {
        "enabled": True,
        "image": {"repository": repository, "tag": tag},
        "args": [
            "--protocol=chat,generate,infer,grpc,grpc-stream",
            "--rate=2",
            "--requests=20",
            "--max-output-tokens=8",
        ],
        "resources": {"requests": {"cpu": "100m"}},
    }
    load["args"] += [f"--slo={slo}" for slo in slos]
    return merged(SMALL, {"loadTest": load})


def ended(kube: Kube, known: set[str]) -> tuple[Object, str]:
    """The Job that is not among ``known``, once it has ended, and what its pod said."""

    def job() -> Object | None:
        found = [one for one in kube.items("jobs") if name_of(one) not in known]
        over = [one for one in found if {"succeeded", "failed"} & set(one.get("status", {}))]
        return over[0] if over else None

    found = until(
        job, 200, lambda: f"an ended Job\n{story(kube)}\n{kube.run('describe', 'jobs', check=False)}", period=1
    )
    return found, kube.run("logs", f"job/{name_of(found)}")


@pytest.mark.skipif(not IMAGE, reason="CAROUSEL_E2E_LOAD_IMAGE names no image of loadtest/Dockerfile")
def test_the_chart_s_load_test_tells_objectives_by_its_exit_code(kube: Kube, report: Callable[..., None]) -> None:
    helm(kube, "install", "chat", str(CHART), "--wait", "--timeout=300s", values=with_load("errors=0", "ttft_p99=60s"))
    wait_pods(kube, 1)
    met, said = ended(kube, set())
    assert met["status"].get("succeeded") == 1, said
    assert said.count("SLO met") == 2
    assert [name for name in ("chat", "generate", "infer", "grpc", "grpc-stream") if name not in said] == []
    helm(kube, "upgrade", "chat", str(CHART), "--wait", "--timeout=300s", values=with_load("ttft_p99=1us"))
    missed, said = ended(kube, {name_of(met)})
    assert missed["status"].get("failed") == 1, said
    assert "SLO MISSED" in said
    report(load_test=said[-1500:])
    helm(kube, "uninstall", "chat", "--wait", "--timeout=120s")
    assert kube.items("jobs") == []
