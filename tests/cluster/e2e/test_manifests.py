"""Every manifest against the API server's schemas and admission: `kubectl apply --dry-run=server`."""

from __future__ import annotations

import pytest
from tests.cluster.e2e.kube import Kube, KubectlError
from tests.manifests.kustomized import MANIFESTS, build, folders, read

pytestmark = pytest.mark.timeout(120)
#: Kinds that a cluster need not have, and what brings them.
OPTIONAL = {
    "PodMonitor": "the Prometheus operator",
    "ServiceMonitor": "the Prometheus operator",
    "ScaledObject": "KEDA",
}


@pytest.mark.parametrize("name", [*folders(), "example.yaml"])
def test_the_api_server_takes_it(name: str) -> None:
    kube = Kube("default")  # nothing is made
    path = MANIFESTS / name
    missing = []
    for item in read(path) if path.is_file() else build(path):
        try:
            # Strict: a misspelt field is refused, and not dropped.
            kube.apply(item, words=("--dry-run=server", "--validate=strict"))
        except KubectlError as error:
            if item["kind"] not in OPTIONAL or "no matches for kind" not in str(error):
                raise
            missing.append(f"{item['kind']} ({OPTIONAL[item['kind']]})")
    print(f"{name}: all taken" + (f", but this cluster has no {', '.join(missing)}" if missing else ""))


def test_a_misspelt_field_is_refused() -> None:
    (service,) = read(MANIFESTS / "example.yaml")
    service["spec"]["predictor"]["containers"][0]["imagePullPolice"] = "Always"
    with pytest.raises(KubectlError, match="imagePullPolice"):
        Kube("default").apply(service, words=("--dry-run=server", "--validate=strict"))
