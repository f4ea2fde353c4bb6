"""Model sources over a network: http(s)://, object stores and the Hugging Face Hub, all on loopback."""

from __future__ import annotations

import hashlib
import logging
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from tests.models.servers import FakeHub, FileServer, serving

from carousel.models.fetch import remote
from carousel.models.source import SourceError, resolve

CONTENT = bytes(range(256)) * 4096  # 1 MiB
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "BACKOFF_S", 0.001)
    monkeypatch.setattr(remote, "CHUNK", 1 << 18)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def web() -> Iterator[FileServer]:
    server = FileServer()
    server.files["/m.gguf"] = CONTENT
    with serving(server):
        yield server


# --- http


def test_http_file_is_fetched_once(web: FileServer, tmp_path: Path) -> None:
    path = resolve(f"{web.url}/m.gguf#sha256={DIGEST}", cache_dir=tmp_path)
    assert path.name == "m.gguf"
    assert path.read_bytes() == CONTENT
    seen = len(web.requests)
    assert resolve(f"{web.url}/m.gguf", cache_dir=tmp_path) == path
    assert len(web.requests) == seen
    assert [file.name for file in path.parent.iterdir()] == ["m.gguf"]


def test_kserve_5326_a_download_is_never_in_memory_as_a_whole(web: FileServer, tmp_path: Path) -> None:
    """kserve#5326, #5162: the storage initializer ran out of memory."""
    web.files["/big.gguf"] = bytes(16 << 20)
    tracemalloc.start()
    try:
        path = resolve(f"{web.url}/big.gguf", cache_dir=tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert path.stat().st_size == 16 << 20
    assert peak < 8 << 20  # chunks and their copies, on both sides of the connection


def test_interrupted_connections_are_resumed_within_a_run(
    web: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    web.cuts, web.cut_after = 3, 100_000
    assert resolve(f"{web.url}/m.gguf", cache_dir=tmp_path).read_bytes() == CONTENT
    assert web.cuts == 0
    assert caplog.text.count("the download was interrupted") == 3


@contextmanager
def interrupted_after(monkeypatch: pytest.MonkeyPatch, first: bytes) -> Iterator[None]:
    """Within it, a download gets these bytes and then breaks for good."""

    def blocks(*args: object, **kwargs: object) -> Iterator[bytes]:
        yield first
        raise ConnectionResetError("reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(remote, "ATTEMPTS", 1)
        patch.setattr(remote, "_blocks", blocks)
        with pytest.raises(SourceError, match="reset by peer"):
            yield


def test_interrupted_run_is_resumed_by_the_next(
    web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with interrupted_after(monkeypatch, CONTENT[: remote.CHUNK]):
        resolve(f"{web.url}/m.gguf", cache_dir=tmp_path)
    (part,) = tmp_path.rglob("m.gguf.part")
    assert part.stat().st_size == remote.CHUNK
    assert not list(tmp_path.rglob("m.gguf"))
    web.requests.clear()
    assert resolve(f"{web.url}/m.gguf", cache_dir=tmp_path).read_bytes() == CONTENT
    ranges = [header for header in web.bodies_requested() if header]
    assert ranges[0] == f"bytes={remote.CHUNK}-{2 * remote.CHUNK - 1}"
    assert len(ranges) == 3


def test_part_of_another_version_is_not_resumed(
    web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with interrupted_after(monkeypatch, CONTENT[: remote.CHUNK]):
        resolve(f"{web.url}/m.gguf", cache_dir=tmp_path)
    web.files["/m.gguf"] = CONTENT[::-1]
    assert resolve(f"{web.url}/m.gguf", cache_dir=tmp_path).read_bytes() == CONTENT[::-1]


def test_damaged_part_is_downloaded_again_when_the_checksum_tells(
    web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with interrupted_after(monkeypatch, b"x" * 1000):
        resolve(f"{web.url}/m.gguf", cache_dir=tmp_path)
    assert resolve(f"{web.url}/m.gguf", cache_dir=tmp_path, checksum=DIGEST).read_bytes() == CONTENT


def test_server_without_ranges(web: FileServer, tmp_path: Path) -> None:
    web.ranges = False
    web.cuts, web.cut_after = 1, 300_000
    assert resolve(f"{web.url}/m.gguf", cache_dir=tmp_path).read_bytes() == CONTENT


def test_server_without_lengths(web: FileServer, tmp_path: Path) -> None:
    web.lengths = web.ranges = False
    assert resolve(f"{web.url}/m.gguf", cache_dir=tmp_path, checksum=DIGEST).read_bytes() == CONTENT


def test_checksum_mismatch_leaves_nothing(web: FileServer, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=rf"{web.url}/m.gguf: its SHA-256 is {DIGEST}, expected 1111"):
        resolve(f"{web.url}/m.gguf", cache_dir=tmp_path, checksum="1" * 64)
    assert not list(tmp_path.rglob("m.gguf*"))


@pytest.mark.parametrize(("status", "tries"), [(404, 2), (403, 2), (503, 2 * remote.ATTEMPTS)])
def test_http_refusals_name_the_status(web: FileServer, tmp_path: Path, status: int, tries: int) -> None:
    web.status["/m.gguf"] = status
    with pytest.raises(SourceError, match=rf"{web.url}/m.gguf: the server answered {status} .*curl -I"):
        resolve(f"{web.url}/m.gguf", cache_dir=tmp_path)
    assert len(web.requests) == tries  # each try is HEAD, then GET


def test_http_unreachable_server_and_folder(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"http://127.0.0.1:1/m.gguf: .*Connect call failed"):
        resolve("http://127.0.0.1:1/m.gguf", cache_dir=tmp_path)
    with pytest.raises(SourceError, match=r"http://127.0.0.1:1/models/: a web server's folder"):
        resolve("http://127.0.0.1:1/models/", cache_dir=tmp_path)


def test_secrets_in_a_url_are_not_shown(tmp_path: Path) -> None:
    with pytest.raises(SourceError) as caught:
        resolve("http://user:hunter2@127.0.0.1:1/m.gguf?X-Signature=abc123", cache_dir=tmp_path)
    assert "http://127.0.0.1:1/m.gguf?..." in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "abc123" not in str(caught.value)


def test_too_little_space_is_found_before_the_download(
    web: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(SourceError, match=r"m.gguf: 1.0 MB are needed in .* 0.0 MB are free"):
        resolve(f"{web.url}/m.gguf", cache_dir=tmp_path)
    assert web.bodies_requested() == []


def test_unknown_scheme_and_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match=r"nosuch://a/b: its scheme nosuch:// is not known.*Use pypi://"):
        resolve("nosuch://a/b", cache_dir=tmp_path)

    def missing(*args: object, **kwargs: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", missing)
    with pytest.raises(SourceError, match=r's3://bucket/m.gguf: .*pip install "kserve-carousel\[s3\]"'):
        resolve("s3://bucket/m.gguf", cache_dir=tmp_path)


# --- object stores


class FakeS3(MemoryFileSystem):
    """fsspec's memory file system under s3://, with a store of its own and connections that can break."""

    protocol = "s3"
    store: dict = {}  # noqa: RUF012 - fsspec's own design
    pseudo_dirs = [""]  # noqa: RUF012
    root_marker = "/"
    breaks = 0
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("s3://").strip("/")

    def open(self, path: str, *args: object, **kwargs: object) -> object:
        if type(self).breaks > 0:
            type(self).breaks -= 1
            raise TimeoutError("the store is busy")
        return super().open(path, *args, **kwargs)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    monkeypatch.setitem(_registry, "s3", FakeS3)
    store = FakeS3()
    files = {
        "model.safetensors": CONTENT,
        "config.json": b"{}",
        "sub/tokenizer.json": b"[]",
        "pytorch_model.bin": b"no",
    }
    for name, content in files.items():
        store.pipe_file(f"s3://bucket/llm/{name}", content)
    yield store
    FakeS3.store.clear()
    FakeS3.pseudo_dirs[:] = [""]
    FakeS3.breaks = 0


def test_s3_prefix_is_a_folder_without_foreign_weights(bucket: FakeS3, tmp_path: Path) -> None:
    folder = resolve("s3://bucket/llm", cache_dir=tmp_path)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert names == ["config.json", "model.safetensors", "sub/tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    bucket.store.clear()
    assert resolve("s3://bucket/llm", cache_dir=tmp_path) == folder


def test_s3_single_object_and_busy_store(bucket: FakeS3, tmp_path: Path) -> None:
    FakeS3.breaks = 2
    path = resolve("s3://bucket/llm/model.safetensors", cache_dir=tmp_path, checksum=DIGEST)
    assert path.name == "model.safetensors"
    assert path.read_bytes() == CONTENT
    assert FakeS3.breaks == 0


def test_s3_folder_goes_on_after_an_interruption(
    bucket: FakeS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    download = remote._download

    def counted(wanted: object, system: object, file: remote._Remote, part: Path) -> None:
        if file.name == "model.safetensors" and fetched == ["config.json"]:
            fetched.append("interrupted")
            raise KeyboardInterrupt
        fetched.append(file.name)
        download(wanted, system, file, part)  # type: ignore[arg-type]

    monkeypatch.setattr(remote, "_download", counted)
    with pytest.raises(KeyboardInterrupt):
        resolve("s3://bucket/llm", cache_dir=tmp_path)
    folder = resolve("s3://bucket/llm", cache_dir=tmp_path)
    assert fetched == ["config.json", "interrupted", "model.safetensors", "sub/tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == CONTENT


def test_s3_mistakes(bucket: FakeS3, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"s3://bucket/nothing: there is nothing at this place.*AWS_"):
        resolve("s3://bucket/nothing", cache_dir=tmp_path)
    bucket.pipe_file("s3://bucket/text/readme.txt", b"x")
    with pytest.raises(SourceError, match=r"s3://bucket/text: there is no \.safetensors or \.gguf.*readme.txt"):
        resolve("s3://bucket/text", cache_dir=tmp_path)
    with pytest.raises(SourceError, match="the model is a folder"):
        resolve("s3://bucket/llm", cache_dir=tmp_path, checksum=DIGEST)


# --- the Hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    server = FakeHub("org/tiny")
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "xet"))
    with serving(server):
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_hub_takes_safetensors_and_what_belongs_to_them(hub: FakeHub, tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja"):
        hub.add(name, name.encode())
    for name in ("pytorch_model.bin", "README.md", "onnx/model.onnx", "onnx/config.json", "consolidated.safetensors"):
        hub.add(name, b"not wanted")
    folder = resolve("hf://org/tiny", cache_dir=tmp_path / "c")
    assert sorted(path.name for path in folder.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (folder / "model.safetensors").read_bytes() == b"model.safetensors"


def test_hub_gguf_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("tiny-q4.gguf", CONTENT)
    hub.add("README.md", b"x")
    path = resolve(f"hf://org/tiny#sha256={DIGEST}", cache_dir=tmp_path / "c")
    assert path.name == "tiny-q4.gguf"
    assert hub.downloads() == ["tiny-q4.gguf"]
    hub.files.clear()
    hub.commit = "d" * 40
    hub.add("tiny-q4.gguf", CONTENT)
    hub.add("tiny-q8.gguf", b"8")
    with pytest.raises(
        SourceError, match=r"hf://org/tiny@main: the repository holds 2 GGUF.*tiny-q4.gguf, tiny-q8.gguf"
    ):
        resolve("hf://org/tiny@main", cache_dir=tmp_path / "d")
    assert resolve("hf://org/tiny@main/tiny-q8.gguf", cache_dir=tmp_path / "c").read_bytes() == b"8"
    with pytest.raises(SourceError, match=r"has no file 'no.gguf'"):
        resolve("hf://org/tiny@main/no.gguf", cache_dir=tmp_path / "c")


def test_hub_commit_needs_no_hub_once_cached(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("m.gguf", CONTENT)
    uri = f"hf://org/tiny@{hub.commit}"
    path = resolve(uri, cache_dir=tmp_path / "c")
    hub.requests.clear()
    assert resolve(uri, cache_dir=tmp_path / "c") == path
    assert hub.requests == []
    # KServe writes the revision behind a colon.
    assert resolve(f"hf://org/tiny:{hub.commit}", cache_dir=tmp_path / "c").read_bytes() == CONTENT


def test_hub_branch_follows_the_hub_and_outlives_it(
    hub: FakeHub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("m.gguf", b"old")
    first = resolve("hf://org/tiny", cache_dir=tmp_path / "c")
    hub.files.clear()
    hub.commit = "d" * 40
    hub.add("m.gguf", b"newer")
    second = resolve("hf://org/tiny", cache_dir=tmp_path / "c")
    assert (first.read_bytes(), second.read_bytes()) == (b"old", b"newer")
    hub.down = True
    with caplog.at_level(logging.WARNING):
        assert resolve("hf://org/tiny", cache_dir=tmp_path / "c") == second
    assert "using what is cached" in caplog.text
    with pytest.raises(SourceError, match=r"hf://org/tiny: the download failed: .*503.*HF_ENDPOINT"):
        resolve("hf://org/tiny", cache_dir=tmp_path / "empty")


def test_hub_damaged_blob_is_replaced(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("m.gguf", CONTENT)
    path = resolve("hf://org/tiny", cache_dir=tmp_path / "c")
    path.resolve().write_bytes(b"short")
    assert resolve("hf://org/tiny", cache_dir=tmp_path / "c").read_bytes() == CONTENT


def test_hub_refusals_say_what_to_do(hub: FakeHub, tmp_path: Path) -> None:
    hub.add("pytorch_model.bin", b"x")
    with pytest.raises(SourceError, match=r"hf://org/tiny: .*no \.safetensors or \.gguf file"):
        resolve("hf://org/tiny", cache_dir=tmp_path)
    with pytest.raises(SourceError, match=r"hf://org/other: .*has no repository org/other.*HF_TOKEN"):
        resolve("hf://org/other", cache_dir=tmp_path)
    with pytest.raises(SourceError, match=r"hf://org/tiny@v9: org/tiny has no such revision"):
        resolve("hf://org/tiny@v9", cache_dir=tmp_path)
    with pytest.raises(SourceError, match=r"hf://a/b@c@d: .*Write hf://org/repo"):
        resolve("hf://a/b@c@d", cache_dir=tmp_path)
    hub.gated = True
    with pytest.raises(SourceError, match=r"hf://org/tiny: access to org/tiny is restricted.*terms.*HF_TOKEN"):
        resolve("hf://org/tiny", cache_dir=tmp_path)
