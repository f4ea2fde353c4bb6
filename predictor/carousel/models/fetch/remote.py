"""``s3://``, ``gs://``, ``http(s)://`` and other object stores: one file or a folder, through fsspec, resumable.

A file grows as ``<name>.part`` beside ``<name>.part.json``, which says what it is a part of (size, ETag ...). A later
run goes on where an interrupted one stopped, if that is still what the store holds.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carousel.models.fetch.cache import Entry, FileRecord, Manifest, Wanted, check_sha256, log, record_of, sha256_of
from carousel.models.fetch.errors import SourceError, shown
from carousel.models.fetch.progress import Progress, megabytes

CHUNK = 8 << 20  # bytes asked for at once: few enough requests, and little lost at an interruption
ATTEMPTS = 5  # in a row without a byte of progress
BACKOFF_S = 0.5
_MODEL_FILES = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt")
_IDENTITY = ("size", "ETag", "etag", "md5Hash", "Content-MD5", "LastModified", "Last-Modified", "updated", "mtime")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_PERMANENT_STATUS = {400, 401, 403, 404, 405, 410, 451}


@dataclass(frozen=True)
class _Remote:
    """One file in the store: its path there, its name here, size in bytes (None: unknown) and identity."""

    path: str
    name: str
    size: int | None
    identity: dict[str, str]
    ranges: bool


def fetch(wanted: Wanted, entry: Entry, _known: Manifest | None) -> Manifest:
    """Download the file, or the model's files under a prefix."""
    system, path = _open_store(wanted)
    scheme = wanted.uri.partition("://")[0].lower()
    remotes = _with_retries(wanted, lambda: _list(wanted, system, path, web=scheme in {"http", "https"}))
    whole = len(remotes) > 1 or remotes[0].path.rstrip("/") != path.rstrip("/")
    if whole and wanted.sha256 is not None:
        hint = "Name one file in the URI, or leave the checksum out."
        raise SourceError(wanted.uri, "a checksum was given, but the model is a folder", hint)
    entry.folder.mkdir(parents=True, exist_ok=True)
    _check_space(wanted, entry, remotes)
    files = {}
    for remote in remotes:
        target = entry.folder / remote.name
        files[entry.name_of(target)] = _fetch_file(wanted, system, remote, target)
    for remote in remotes:
        _description(entry.folder / remote.name).unlink(missing_ok=True)
    return Manifest(entry.name_of(entry.folder if whole else entry.folder / remotes[0].name), files)


def _open_store(wanted: Wanted) -> tuple[Any, str]:
    import fsspec

    scheme = wanted.uri.partition("://")[0].lower()
    options: dict[str, Any] = {}
    if scheme in {"http", "https"}:
        import aiohttp

        # No limit on a whole download, only on silence; proxies as the environment says.
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=20, sock_read=60)
        headers = {"Accept-Encoding": "identity"}  # a compressed body has other offsets
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True, "headers": headers}
    try:
        system, path = fsspec.core.url_to_fs(wanted.uri, **options)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        hint = f'pip install "kserve-carousel[{extra}]"' if extra else f"Install the package it names: {error}"
        raise SourceError(wanted.uri, f"the package for {scheme}:// is not installed ({error})", hint) from error
    except ValueError as error:
        hint = "Use pypi://, hf://, s3://, gs://, http(s)://, file:// or a path."
        raise SourceError(wanted.uri, f"its scheme {scheme}:// is not known ({error})", hint) from error
    except Exception as error:  # each store's own: no credentials, a malformed bucket ...
        raise SourceError(wanted.uri, _cause(error), _hint(scheme)) from error
    return system, str(path)


def _list(wanted: Wanted, system: Any, path: str, *, web: bool) -> list[_Remote]:
    """What to download: the one file at `path`, or the model's files below it."""
    if web and not path.endswith("/"):
        return [_remote(system.info(path), path, path.partition("?")[0].rsplit("/", 1)[-1])]
    if web:
        hint = "Give the URL of one file (a .gguf), or use s3://, gs:// or hf:// for a folder."
        raise SourceError(wanted.uri, "a web server's folder cannot be listed", hint)
    info = system.info(path)
    if info["type"] == "file":
        return [_remote(info, path, path.rsplit("/", 1)[-1])]
    found = system.find(path, detail=True)
    prefix = path.rstrip("/") + "/"
    remotes = [
        _remote(info, name, name.removeprefix(prefix))
        for name, info in sorted(found.items())
        if name.endswith(_MODEL_FILES) and info.get("type") == "file"
    ]
    if not any(remote.name.endswith((".safetensors", ".gguf")) for remote in remotes):
        listed = ", ".join(name.removeprefix(prefix) for name in sorted(found)[:20]) or "nothing"
        hint = f"Check the prefix: it holds {listed}."
        raise SourceError(wanted.uri, "there is no .safetensors or .gguf file under it", hint)
    for remote in remotes:
        if ".." in Path(remote.name).parts or Path(remote.name).is_absolute():
            raise SourceError(wanted.uri, f"the store lists the path {remote.name!r}", "Remove that object.")
    return remotes


def _remote(info: dict[str, Any], path: str, name: str) -> _Remote:
    identity = {key: str(info[key]) for key in _IDENTITY if info.get(key) is not None}
    return _Remote(path, name or "model", info.get("size"), identity, info.get("partial") is not False)


def _check_space(wanted: Wanted, entry: Entry, remotes: list[_Remote]) -> None:
    need = 0
    for remote in remotes:
        target = entry.folder / remote.name
        here = sum(path.stat().st_size for path in (target, _part(target)) if path.exists())
        need += max(0, (remote.size or 0) - here)
    free = shutil.disk_usage(entry.folder).free
    if need > free:
        cause = f"{megabytes(need)} are needed in {entry.root}, {megabytes(free)} are free"
        raise SourceError(wanted.uri, cause, "Free some space, or point CAROUSEL_CACHE_DIR at a larger disk.")


def _fetch_file(wanted: Wanted, system: Any, remote: _Remote, target: Path) -> FileRecord:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = _part(target)
    described = _description(target)
    if target.exists() and _read(described) == remote.identity:  # a folder's download was interrupted after this one
        return record_of(target)
    target.unlink(missing_ok=True)
    if _read(described) != remote.identity:
        part.unlink(missing_ok=True)
        described.write_text(json.dumps(remote.identity), "utf-8")
    resumed = part.exists() and part.stat().st_size > 0
    _download(wanted, system, remote, part)
    digest = sha256_of(part)
    if resumed and wanted.sha256 not in {None, digest}:
        log.warning("the resumed %s has a wrong checksum: once more from its beginning", remote.name)
        part.unlink()
        _download(wanted, system, remote, part)
        digest = sha256_of(part)
    try:
        check_sha256(wanted, digest)
    except SourceError:
        part.unlink()
        described.unlink()
        raise
    part.replace(target)
    return record_of(target, digest)


def _download(wanted: Wanted, system: Any, remote: _Remote, part: Path) -> None:
    """Make `part` whole, over as many connections as it takes."""
    ranges = remote.ranges and remote.size is not None
    failures = 0
    done = part.stat().st_size if part.exists() else 0
    with Progress(remote.name, remote.size, done) as progress:
        while True:
            before = done
            try:
                with part.open("ab") as file:
                    if not ranges or done > (remote.size or 0):
                        file.truncate(0)
                        before = done = 0
                    for block in _blocks(system, remote, done, ranges=ranges):
                        file.write(block)
                        done += len(block)
                        progress.update(done)
                if remote.size is None or done == remote.size:
                    return
                raise ConnectionError(f"the connection ended after {done} of {remote.size} bytes")
            except Exception as error:
                if isinstance(error, ValueError) and "range" in str(error):
                    log.info("the server sends %s only as a whole: from its beginning", remote.name)
                    ranges = False
                    continue
                done = part.stat().st_size
                failures = 1 if ranges and done > before else failures + 1
                if failures >= ATTEMPTS or _is_permanent(error):
                    raise SourceError(wanted.uri, _cause(error), _hint(wanted.uri.partition("://")[0])) from error
                _wait(failures, error)


def _blocks(system: Any, remote: _Remote, start: int, *, ranges: bool) -> Iterator[bytes]:
    if remote.size is not None and start >= remote.size:
        return
    if ranges:
        with system.open(remote.path, "rb", block_size=CHUNK, cache_type="none", size=remote.size) as source:
            source.seek(start)
            while block := source.read(CHUNK):
                yield block
        return
    with system.open(remote.path, "rb", block_size=0) as source:
        while block := source.read(1 << 20):
            yield block


def _with_retries(wanted: Wanted, call: Any) -> Any:
    for failures in range(1, ATTEMPTS + 1):
        try:
            return call()
        except SourceError:
            raise
        except Exception as error:
            if failures == ATTEMPTS or _is_permanent(error):
                raise SourceError(wanted.uri, _cause(error), _hint(wanted.uri.partition("://")[0])) from error
            _wait(failures, error)
    raise AssertionError("unreachable")


def _wait(failures: int, error: Exception) -> None:
    pause = BACKOFF_S * 2 ** (failures - 1)
    log.warning("the download was interrupted (%s): going on in %.1f s", _cause(error), pause)
    time.sleep(pause)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_permanent(error: Exception) -> bool:
    """Whether trying again is in vain. fsspec hides each failed HTTP look-up behind a FileNotFoundError."""
    causes = list(_chain(error))
    statuses = [status for cause in causes if (status := getattr(cause, "status", None)) is not None]
    if statuses:
        return statuses[-1] in _PERMANENT_STATUS
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS}:
        return True
    refused = (FileNotFoundError, PermissionError, ValueError, TypeError, NotImplementedError)
    return len(causes) == 1 and isinstance(error, refused)


def _cause(error: Exception) -> str:
    last = list(_chain(error))[-1]
    status = getattr(last, "status", None)
    if status is not None:
        return f"the server answered {status} {getattr(last, 'message', '')}".strip()
    text = shown(str(last).strip().splitlines()[0]) if str(last).strip() else type(last).__name__
    if isinstance(last, FileNotFoundError):
        return f"there is nothing at this place ({text})"
    return text


def _hint(scheme: str) -> str:
    if scheme in {"s3", "s3a"}:
        return "Check bucket, key and the credentials (AWS_* variables; AWS_ENDPOINT_URL for a store of your own)."
    if scheme in {"gs", "gcs"}:
        return (
            "Check bucket, object and the credentials (GOOGLE_APPLICATION_CREDENTIALS, or the pod's service account)."
        )
    return "Check the address with curl -I from this machine; a proxy goes into HTTPS_PROXY."


def _part(target: Path) -> Path:
    return target.with_name(target.name + ".part")


def _description(target: Path) -> Path:
    return target.with_name(target.name + ".part.json")


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
