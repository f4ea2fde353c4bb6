"""Finding pods: through the API, with all that it does to a watch, and through DNS."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

import pytest
from cluster_fakes import Clock, FakeKube, pod_json, running, until

from carousel.cluster import kube, pods
from carousel.cluster.kube import Complaint, KubeApi, KubeError, KubeUnreachable
from carousel.cluster.pods import ApiPods, DnsPods, read_pod

FAILED = Complaint.failed


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Back-off without waiting; how long it would be is a test of its own."""
    monkeypatch.setattr(pods, "_SHORTEST_WATCH_S", 0.02)
    monkeypatch.setattr(Complaint, "failed", lambda self, error, hint="": min(FAILED(self, error, hint), 0.02))


def ready(source: ApiPods) -> set[str]:
    return {pod.name for pod in source.pods() if pod.ready}


async def test_pods_appear_turn_ready_are_deleted_and_go() -> None:
    async with FakeKube() as api, KubeApi(api.url, "models") as client:
        api.put("a")
        changes = []
        source = ApiPods(client, "app=x")
        source.on_change = lambda: changes.append(1)
        async with running(source.run()):
            await until(lambda: api.watchers)
            assert ready(source) == {"a"}
            assert source.age() == 0
            api.put("b", ready=False)
            await until(lambda: len(source.pods()) == 2)
            assert ready(source) == {"a"}
            api.put("b")
            await until(lambda: ready(source) == {"a", "b"})
            api.put("a", deletionTimestamp="2026-11-30T00:00:00Z")
            await until(lambda: ready(source) == {"b"})
            api.remove("a")
            await until(lambda: len(source.pods()) == 1)
            count = len(changes)
            api.put("b", annotations={"controller.kubernetes.io/pod-deletion-cost": "7"})
            api.put("c")
            await until(lambda: "c" in ready(source))
            assert len(changes) == count + 1, "an annotation is no news"
    assert api.queries[0] == {"labelSelector": "app=x", "resourceVersion": "0"}
    assert api.queries[1]["watch"] == "true"
    assert api.queries[1]["resourceVersion"] == "11"


async def test_a_watch_that_ends_goes_on_where_it_was() -> None:
    async with FakeKube() as api, KubeApi(api.url, "models") as client:
        api.put("a")
        source = ApiPods(client, "app=x")
        async with running(source.run()):
            await until(lambda: api.watchers)
            api.put("b")
            await until(lambda: len(source.pods()) == 2)
            api.end_watches()
            await until(lambda: api.calls.count("watch") == 2 and api.watchers)
            assert api.queries[-1]["resourceVersion"] == "12"
            assert api.calls.count("list") == 1
            api.put("c")
            await until(lambda: len(source.pods()) == 3)


async def test_a_version_that_is_gone_means_another_list() -> None:
    async with FakeKube() as api, KubeApi(api.url, "models") as client:
        api.put("a")
        api.gone_once = True
        source = ApiPods(client, "app=x")
        async with running(source.run()):
            await until(lambda: api.watchers)
            assert api.calls == ["list", "watch", "list", "watch"]
            assert ready(source) == {"a"}
            assert source.problem is None


@pytest.mark.parametrize("trouble", ["403", "500", "garbage", "hang"])
async def test_trouble_is_said_once_and_the_last_list_stays(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with FakeKube() as api, KubeApi(api.url, "models", timeout_s=0.2) as client:
        api.put("a")
        source = ApiPods(client, "app=x")
        async with running(source.run()):
            await until(lambda: api.watchers)
            api.refuse = int(trouble) if trouble.isdigit() else None
            api.garbage, api.hang = trouble == "garbage", trouble == "hang"
            api.end_watches()
            calls = len(api.calls)
            await until(lambda: len(api.calls) > calls + 3)
            assert source.problem
            assert source.age() > 0
            assert ready(source) == {"a"}
            api.refuse, api.garbage, api.hang = None, False, False
            api.pods.clear()
            api.put("b")
            await until(lambda: ready(source) == {"b"} and source.problem is None)
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    if trouble == "403":
        assert "HTTP 403: pods is refused (403)" in errors[0].getMessage()
        assert "Role with pods: [list, watch]" in errors[0].getMessage()
    assert sum("works again" in record.getMessage() for record in caplog.records) == 1


async def test_an_api_server_that_is_killed_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    first = FakeKube()
    async with first:
        first.put("a")
        port = first.server.port
        client = KubeApi(first.url, "models", timeout_s=5.0)
        source = ApiPods(client, "app=x")
        async with running(source.run()):
            await until(lambda: first.watchers)
            await first.stop()
            await until(lambda: source.problem is not None)
            assert f"127.0.0.1:{port}" in str(source.problem)
            assert ready(source) == {"a"}
            second = FakeKube()
            second.server.port = port
            second.put("b")
            await second.server.start_server()
            await until(lambda: ready(source) == {"b"})
            await second.stop()
        await client.close()
    assert sum(record.levelno >= logging.ERROR for record in caplog.records) == 1


def test_pods_that_have_ended_are_none() -> None:
    assert read_pod({"metadata": {"name": "a"}, "status": {"phase": "Failed"}}) is None
    assert read_pod({"metadata": {}, "status": {}}) is None
    starting = read_pod({"metadata": {"name": "a"}})
    assert starting is not None
    assert not starting.ready
    no_address = read_pod(pod_json("a", address=""))
    assert no_address is not None
    assert not no_address.ready


async def test_the_token_is_read_again_because_it_is_renewed(tmp_path: Path) -> None:
    token = tmp_path / "token"
    async with FakeKube() as api, KubeApi(api.url, "models", token) as client:
        token.write_text("one\n")
        await client.list_pods("app=x")
        token.write_text("two\n")
        await client.list_pods("app=x")
        token.unlink()
        with pytest.raises(KubeUnreachable, match="token cannot be read"):
            await client.list_pods("app=x")
    assert api.tokens == ["Bearer one", "Bearer two"]


def test_outside_of_a_cluster_the_reason_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(KubeUnreachable, match="no namespace"):
        KubeApi.in_cluster(account=tmp_path)
    with pytest.raises(KubeUnreachable, match="does not run in a Kubernetes cluster"):
        KubeApi.in_cluster("models", account=tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT_HTTPS", "6443")
    with pytest.raises(KubeUnreachable, match="automountServiceAccountToken: true"):
        KubeApi.in_cluster("models", account=tmp_path)
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("own\n")
    found = KubeApi.in_cluster(account=tmp_path)
    assert (found.base_url, found.namespace) == ("https://[fd00::1]:6443", "own")
    assert KubeApi.in_cluster("models", "http://127.0.0.1:8001").base_url == "http://127.0.0.1:8001"


def test_pauses_grow_to_a_bound_and_shrink_after_success() -> None:
    complaint = Complaint(logging.getLogger("test"), "it", first_s=1.0, longest_s=20.0)
    for wanted in (1.0, 2.0, 4.0, 8.0, 16.0, 20.0, 20.0):
        assert 0.75 * wanted <= FAILED(complaint, KubeError("no")) <= 1.25 * wanted
    complaint.worked()
    assert FAILED(complaint, KubeError("no")) <= 1.25


# --- DNS


async def test_dns_names_give_ready_pods_and_none_at_zero(caplog: pytest.LogCaptureFixture) -> None:
    found: list[str] = []
    failing = False

    async def resolve(name: str) -> list[str]:
        assert name == "pods.models.svc"
        if failing:
            raise socket.gaierror(socket.EAI_AGAIN, "try again")
        return list(found)

    clock = Clock()
    source = DnsPods("pods.models.svc", 0.01, clock, resolve)
    changes = []
    source.on_change = lambda: changes.append(len(source.pods()))
    assert source.age() == float("inf")
    async with running(source.run()):
        await until(lambda: source.age() == 0)
        found += ["10.0.0.1", "fd00::2"]
        await until(lambda: changes == [2])
        assert all(pod.ready for pod in source.pods())
        failing = True
        await until(lambda: source.problem is not None)
        clock.now += 5
        assert source.age() == 5
        assert len(source.pods()) == 2
        failing = False
        found.clear()
        await until(lambda: changes == [2, 0])
    assert sum(record.levelno >= logging.ERROR for record in caplog.records) == 1


async def test_a_name_that_nobody_has_is_zero_pods_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lookup(*args: object, **kwargs: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup, raising=False)
    assert await pods.addresses("nobody.invalid") == []


def test_kube_module_does_without_the_heavy_client() -> None:
    assert "import kubernetes" not in Path(kube.__file__).read_text("utf-8")
