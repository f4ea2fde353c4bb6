"""API keys: files, reloads, constant time, every protocol, tenants that cannot be claimed, and no key in any log."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from unittest.mock import patch

import grpc
import httpx
import openai
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from hypothesis import given
from hypothesis import strategies as st
from kserve.protocol.grpc import grpc_predict_v2_pb2 as pb
from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub
from tests.server.harness import Running, serving_fake, wait_until

from carousel.auth import (
    ApiKeys,
    Grant,
    KeysUnreadable,
    is_open_method,
    is_open_route,
    presented_keys,
    read_keys,
)
from carousel.protocols.errors import AuthenticationFailed

KEY, GOLD, OTHER = "sk-open-sesame-1", "sk-gold-customer", "sk-nobody-knows"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# --- the files


def test_a_file_with_comments_tenants_and_windows_ends(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbf# ours\r\n\r\n" + f"{KEY}\r\n  {GOLD}=gold.plan-1  \r\nYWJjZGVmZw==\n".encode())
    keys = ApiKeys(file)
    assert len(keys) == 3
    assert keys.check(bearer(KEY)) == Grant(None)
    assert keys.check(bearer(GOLD)) == Grant("gold.plan-1")
    assert keys.check(bearer("YWJjZGVmZw==")) == Grant(None)  # padding of base64 names no tenant


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"short", "line 1"),
        (b"\n# x\nwith a blank\n", "line 3"),
        ("schlüssel-für-alle".encode(), "line 1"),
        (b"x" * 513, "line 1"),
        (b"\xff\xfe\x00k", "UTF-8"),
        (b"# only words\n", "there is no key"),
        (f"{KEY}=a\n{KEY}=b\n".encode(), "line 2"),
    ],
)
def test_files_that_are_refused_say_where_and_show_no_key(tmp_path: Path, text: bytes, words: str) -> None:
    file = tmp_path / "keys"
    file.write_bytes(text)
    with pytest.raises(KeysUnreadable) as caught:
        ApiKeys(file)
    assert str(file) in str(caught.value)
    assert words in str(caught.value)
    assert "blank" not in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_file_that_is_huge_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(KeysUnreadable, match="No such file"):
        read_keys(tmp_path / "none")
    (tmp_path / "huge").write_bytes(b"k" * (2**20 + 1))
    with pytest.raises(KeysUnreadable, match="larger than"):
        read_keys(tmp_path / "huge")


@given(st.binary(max_size=200))
def test_any_bytes_are_keys_or_a_clear_refusal(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any-keys"
    file.write_bytes(raw)
    try:
        found = read_keys(file)
    except KeysUnreadable as error:
        found = None
        said = str(error)
    assert isinstance(found, dict) or str(file) in said


def test_a_mounted_secret_is_swapped_as_kubernetes_does_it(tmp_path: Path) -> None:
    mount, clock = tmp_path / "mount", Clock()
    mount.mkdir()
    for name, key in (("..v1", KEY), ("..v2", OTHER)):
        (mount / name).mkdir()
        (mount / name / "keys").write_text(key)
    (mount / "..data").symlink_to("..v1")
    (mount / "keys").symlink_to("..data/keys")
    keys = ApiKeys(mount, clock)
    assert keys.check(bearer(KEY)) == Grant(None)
    (mount / "..new").symlink_to("..v2")
    (mount / "..new").replace(mount / "..data")
    assert keys.check(bearer(KEY)) == Grant(None)  # not looked at again so soon
    clock.now += 1.5
    assert keys.check(bearer(OTHER)) == Grant(None)
    with pytest.raises(AuthenticationFailed):
        keys.check(bearer(KEY))


def test_a_bad_change_keeps_the_old_keys_and_an_empty_one_locks_everybody_out(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text(KEY)
    keys = ApiKeys(file, clock)
    file.write_text("bad key")
    clock.now += 2
    assert keys.check(bearer(KEY))
    file.unlink()
    clock.now += 2
    assert keys.check(bearer(KEY))
    file.write_text("# nobody\n")
    clock.now += 2
    with pytest.raises(AuthenticationFailed):
        keys.check(bearer(KEY))


def test_every_check_compares_with_every_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\n".join(f"sk-number-{i:03}" for i in range(50)))
    keys = ApiKeys(file)
    for key in ("sk-number-000", "sk-number-049", "x", "ü" * 9, "\ud800"):
        with patch("carousel.auth.hmac.compare_digest", side_effect=lambda a, b: a == b) as compare:
            try:
                keys.check(bearer(key))
            except AuthenticationFailed:
                assert not key.startswith("sk")
        assert compare.call_count == 50
        assert {len(arguments[1]) for arguments, _ in compare.call_args_list} == {32}


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"authorization": f"Bearer {KEY}"}, [KEY]),
        ({"authorization": f"bearer   {KEY} "}, [KEY]),
        ({"x-api-key": KEY}, [KEY]),
        ({"authorization": "Basic eDp5", "x-api-key": KEY}, [KEY]),
        ({"authorization": "Bearer jwt.of.gateway", "x-api-key": KEY}, ["jwt.of.gateway", KEY]),
        ({"authorization": "Bearer "}, []),
        ({"authorization": KEY}, []),
        ({}, []),
    ],
)
def test_where_keys_are_shown(headers: dict[str, str], found: list[str]) -> None:
    assert presented_keys(headers) == found


def test_open_are_health_and_metrics_and_nothing_that_looks_like_them() -> None:
    for path in ("/", "/livez", "/readyz", "/startupz", "/metrics", "/v2/health/live", "/v2/models/m/ready"):
        assert is_open_route("GET", path)
        assert not is_open_route("POST", path)
    for path in (
        "/metrics/../v2/models/m/infer", "/livezz", "/v2/models/m/infer", "/v1/models", "/docs", "/v2/models/a/b/ready",
        "/v2/models/m/ready/", "/v2/models/m/ready\n",
    ):  # fmt: skip
        assert not is_open_route("GET", path)
    assert is_open_method("/grpc.health.v1.Health/Watch")
    assert is_open_method("/inference.GRPCInferenceService/ServerLive")
    assert not is_open_method("/inference.GRPCInferenceService/ModelInfer")
    assert not is_open_method("/other.Service/ServerLive")


# --- a server that asks for them

TEXT = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["a"]}
CALLS = {
    "/v1/models/tiny:predict": {"instances": ["a"]},
    "/v2/models/tiny/infer": {"inputs": [TEXT]},
    "/v2/models/tiny/generate": {"text_input": "a"},
    "/v2/models/tiny/generate_stream": {"text_input": "a"},
    "/v1/completions": {"model": "tiny", "prompt": "a", "max_tokens": 2},
    "/openai/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "stream": True},
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"{KEY}\n{GOLD}=gold\n")
    with serving_fake(model_name="tiny", api_keys=str(file), log_level="debug", trust_tenant_header=True) as running:
        log = io.StringIO()
        handler = logging.StreamHandler(log)
        logging.getLogger().addHandler(handler)
        running.log = log
        yield running
        for key in (KEY, GOLD, OTHER):
            assert key not in log.getvalue()


@pytest.mark.parametrize("path", CALLS)
def test_every_protocol_asks_in_its_own_form(guarded: Running, path: str) -> None:
    with httpx.Client(base_url=guarded.url, timeout=10) as client:
        for headers, words in (({}, "required"), (bearer(OTHER), "not valid"), ({"x-api-key": OTHER}, "not valid")):
            refused = client.post(path, json=CALLS[path], headers=headers)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            assert refused.headers["x-request-id"]
            error = refused.json()["error"]
            if "/models/" in path:
                assert words in error
            else:
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert words in error["message"]
        for headers in (bearer(KEY), {"x-api-key": KEY}):
            assert client.post(path, json=CALLS[path], headers=headers).status_code == 200
    assert not guarded.engine.live


def test_reading_needs_a_key_too_and_probes_do_not(guarded: Running) -> None:
    with httpx.Client(base_url=guarded.url, timeout=10) as client:
        for path in ("/openai/v1/models", "/v2/models/tiny", "/v1/models/tiny", "/no/such/path"):
            assert client.get(path).status_code == 401, path
        for path in ("/", "/livez", "/readyz", "/metrics", "/v2/health/live", "/v2/models/tiny/ready"):
            assert client.get(path).status_code == 200, path
        assert client.get("/v2/models/tiny", headers=bearer(KEY)).status_code == 200


def test_the_openai_client_knows_what_happened(guarded: Running) -> None:
    with openai.OpenAI(base_url=guarded.url + "/v1", api_key=OTHER, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model="tiny", prompt="a")
        assert caught.value.code == "invalid_api_key"
    with openai.OpenAI(base_url=guarded.url + "/v1", api_key=KEY, max_retries=0) as client:
        assert client.completions.create(model="tiny", prompt="a", max_tokens=2).choices[0].text == "w0 w1 "


def test_grpc(guarded: Running) -> None:
    parameters = {"max_tokens": pb.InferParameter(int64_param=2)}
    request = pb.ModelInferRequest(model_name="tiny", parameters=parameters)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    with grpc.insecure_channel(guarded.grpc) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for metadata in ((), (("authorization", f"Bearer {OTHER}"),), (("x-api-key", OTHER),)):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ModelInfer(request, metadata=metadata, timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "API key" in caught.value.details()
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelMetadata(pb.ModelMetadataRequest(name="tiny"), timeout=10)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert stub.ServerLive(pb.ServerLiveRequest(), timeout=10).live
        assert stub.ModelReady(pb.ModelReadyRequest(name="tiny"), timeout=10).ready
        for metadata in ((("authorization", f"Bearer {KEY}"),), (("x-api-key", KEY),)):
            assert stub.ModelInfer(request, metadata=metadata, timeout=10).outputs
        stub.ModelInfer(request, metadata=(("x-api-key", GOLD), ("x-carousel-tenant", "platinum")), timeout=10)
    assert guarded.engine.ended[-1].request.tenant == "gold"


def test_grpc_streams_and_the_health_service(guarded: Running) -> None:
    request = pb.ModelInferRequest(model_name="tiny")
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"a")
    with grpc.insecure_channel(guarded.grpc) as channel:
        stream = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=pb.ModelInferRequest.SerializeToString,
        )
        for metadata in ((), (("x-api-key", OTHER),)):
            with pytest.raises(grpc.RpcError) as caught:
                list(stream(iter([request]), metadata=metadata, timeout=10))
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert list(stream(iter([request]), metadata=(("x-api-key", GOLD),), timeout=10))
        assert HealthStub(channel).Check(HealthCheckRequest(), timeout=10).status == HealthCheckResponse.SERVING
        assert next(HealthStub(channel).Watch(HealthCheckRequest(), timeout=10)).status == HealthCheckResponse.SERVING
    wait_until(lambda: not guarded.engine.live)
    assert guarded.engine.ended[-1].request.tenant == "gold"


@pytest.mark.parametrize("path", CALLS)
def test_a_tenant_of_a_key_cannot_be_claimed_by_another(guarded: Running, path: str) -> None:
    with httpx.Client(base_url=guarded.url, timeout=10) as client:  # one connection: nothing carries over
        for key, claimed, counted in ((GOLD, "platinum", "gold"), (KEY, "mine", "mine"), (GOLD, "", "gold")):
            headers = {**bearer(key), **({"x-carousel-tenant": claimed} if claimed else {})}
            assert client.post(path, json=CALLS[path], headers=headers).status_code == 200
            wait_until(lambda: not guarded.engine.live)
            assert guarded.engine.ended[-1].request.tenant == counted
        assert client.post(path, json=CALLS[path], headers=bearer(KEY)).status_code == 200
        wait_until(lambda: not guarded.engine.live)
        assert guarded.engine.ended[-1].request.tenant != "gold"


def test_a_changed_file_counts_at_once(guarded: Running) -> None:
    file = Path(guarded.settings.api_keys)
    before = file.read_text()
    with httpx.Client(base_url=guarded.url, timeout=10) as client:
        file.write_text(OTHER)
        wait_until(lambda: client.get("/v2/models/tiny", headers=bearer(OTHER)).status_code == 200)
        assert client.get("/v2/models/tiny", headers=bearer(KEY)).status_code == 401
        file.write_text(before)
        wait_until(lambda: client.get("/v2/models/tiny", headers=bearer(KEY)).status_code == 200)


def test_a_server_with_bad_keys_does_not_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "keys").write_text("bad key")
    with serving_fake(ready=False, api_keys=str(tmp_path / "keys")) as running:
        running.thread.join(10)
        assert running.codes == [1]
    assert "--api-keys" in capfd.readouterr().err
