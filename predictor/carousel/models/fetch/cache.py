"""The model cache: entries that are whole or not there, usable when it is read-only.

An entry is a folder ``<root>/<kind>/<key>`` and, beside it, the manifest ``<key>.json``, written last: without a
manifest, or with one that its files do not match, an entry does not exist. ``<key>.lock`` keeps two processes from
fetching the same entry.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from carousel.models.fetch.errors import SourceError, shown
from carousel.models.fetch.progress import LINE_EVERY_S

log = logging.getLogger("carousel.models.source")

_FORMAT = 1
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """What a caller asked for.

    Attributes:
        uri: the URI without its checksum fragment.
        sha256: the hex digest that the one file must have, or None.
        cache: the cache's root folder; it need not exist and may be read-only.
    """

    uri: str
    sha256: str | None
    cache: Path


@dataclass(frozen=True)
class FileRecord:
    """One file of an entry: size in bytes, hex digest ("" when its downloader verified it otherwise), mtime in s."""

    size: int
    sha256: str
    mtime: int


@dataclass(frozen=True)
class Manifest:
    """What an entry holds. `result` is the path to hand out, relative to the cache's root; so are the files' names."""

    result: str
    files: dict[str, FileRecord]
    revision: str = ""


def default_cache() -> Path:
    """``$CAROUSEL_CACHE_DIR``, else ``carousel`` in the user's XDG cache folder."""
    named = os.environ.get("CAROUSEL_CACHE_DIR")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "carousel"
    except RuntimeError:  # no home folder: an arbitrary uid in a container
        return _temporary_root()


def sha256_of(path: Path) -> str:
    """The file's SHA-256 as hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest()


def record_of(path: Path, sha256: str | None = None) -> FileRecord:
    """The record of a file that is whole; hashes it unless its digest is given."""
    status = path.stat()
    return FileRecord(status.st_size, sha256_of(path) if sha256 is None else sha256, int(status.st_mtime))


class Entry:
    """One place of the cache, for one URI."""

    def __init__(self, root: Path, kind: str, uri: str) -> None:
        slug = re.sub(r"[^A-Za-z0-9._=]+", "-", uri.partition("://")[2].partition("?")[0]).strip("-.")[-60:]
        key = f"{slug}-{hashlib.sha256(uri.encode()).hexdigest()[:10]}"
        self.root = root
        self.uri = uri
        self.folder = root / kind / key
        self.manifest_path = root / kind / f"{key}.json"
        self._lock_path = root / kind / f"{key}.lock"

    def load(self) -> Manifest | None:
        """The manifest, if all of its files are here as they were written; None otherwise."""
        try:
            raw = json.loads(self.manifest_path.read_text("utf-8"))
            if raw["format"] != _FORMAT:
                return None
            files = {name: FileRecord(**record) for name, record in raw["files"].items()}
            manifest = Manifest(raw["result"], files, raw["revision"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("the cache's %s cannot be read (%s): fetching again", self.manifest_path, error)
            return None
        for name, record in files.items():
            damage = _damage(self.root / name, record)
            if damage:
                log.warning("the cached %s %s: fetching again", self.root / name, damage)
                return None
        return manifest

    def save(self, manifest: Manifest) -> None:
        """Make the entry exist. Its files must be whole."""
        raw = {
            "format": _FORMAT,
            "uri": shown(self.uri),
            "result": manifest.result,
            "revision": manifest.revision,
            "files": {name: vars(record) for name, record in manifest.files.items()},
        }
        scratch = self.manifest_path.with_suffix(".json.new")
        scratch.write_text(json.dumps(raw, indent=1), "utf-8")
        scratch.replace(self.manifest_path)

    def name_of(self, path: Path) -> str:
        """A path of this entry as manifests write it."""
        return path.relative_to(self.root).as_posix()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the entry alone among processes and threads; waits, and says so."""
        self._lock_path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock_path.open("a") as file:
            said = 0.0
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() - said > LINE_EVERY_S:
                        said = time.monotonic()
                        log.info("another process is fetching %s: waiting for it", shown(self.uri))
                    time.sleep(0.1)
                except OSError as error:
                    if error.errno not in {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}:
                        raise
                    log.warning("no file locks in %s (%s): going on without", self._lock_path.parent, error)
                    break
            yield


def cached_or_fetched(
    wanted: Wanted, kind: str, fetch: Callable[[Entry, Manifest | None], Manifest], *, final: bool = True
) -> Path:
    """The model's path: from the cache, or fetched into it.

    A cache that cannot be written is still read; what it lacks goes to a folder of the system's temporary one.

    Args:
        wanted: the model.
        kind: the cache's subfolder.
        fetch: downloads the model into an entry and returns its manifest. It gets the entry's valid manifest, if
            there is one, and may hand it back.
        final: False if what lies behind the URI may change, so that `fetch` is asked although the cache has an entry.
    """
    temporary = _temporary_root()
    reason = _unwritable(wanted.cache) if not final else ""
    for root in (wanted.cache, temporary) if _is_ours(temporary) else (wanted.cache,):
        entry = Entry(root, kind, wanted.uri)
        manifest = entry.load()
        if manifest is not None and (final or reason) and _has_checksum(entry, manifest, wanted.sha256):
            return root / manifest.result
    root = wanted.cache
    reason = _unwritable(root)
    if reason:
        try:
            temporary.mkdir(mode=0o700, exist_ok=True)
            if not _is_ours(temporary):
                temporary = Path(tempfile.mkdtemp(prefix="carousel-cache-"))
        except OSError as error:
            cause = f"neither the cache {root} ({reason}) nor {temporary} ({error.strerror}) can be written"
            raise SourceError(wanted.uri, cause, "Point CAROUSEL_CACHE_DIR at a folder that can be written.") from error
        log.warning("the model cache %s cannot be written (%s): using %s", root, reason, temporary)
        root = temporary
    entry = Entry(root, kind, wanted.uri)
    with entry.locked():
        manifest = entry.load()  # another process may have fetched it while this one waited
        if manifest is not None and not _has_checksum(entry, manifest, wanted.sha256):
            manifest = None
        if manifest is None or not final:
            known, manifest = manifest, fetch(entry, manifest)
            if manifest != known:
                entry.save(manifest)
    return root / manifest.result


def check_sha256(wanted: Wanted, actual: str) -> None:
    """Raise SourceError if a checksum was asked for and the digest is another one."""
    if wanted.sha256 is not None and actual != wanted.sha256:
        hint = "Compare the checksum with the publisher's; if it is right, the file was altered on its way."
        raise SourceError(wanted.uri, f"its SHA-256 is {actual}, expected {wanted.sha256}", hint)


def _has_checksum(entry: Entry, manifest: Manifest, sha256: str | None) -> bool:
    if sha256 is None:
        return True
    record = manifest.files.get(manifest.result)
    if record is None:
        return False
    return (record.sha256 or sha256_of(entry.root / manifest.result)) == sha256


def _damage(path: Path, record: FileRecord) -> str:
    """What is wrong with a cached file, as a phrase; empty if nothing is."""
    try:
        status = path.stat()
    except OSError:
        return "is missing"
    if status.st_size != record.size:
        return f"has {status.st_size} bytes instead of {record.size}"
    # Only a file that was written since is hashed again: hashing gigabytes at each start would cost seconds.
    if record.sha256 and int(status.st_mtime) != record.mtime and sha256_of(path) != record.sha256:
        return "has changed"
    return ""


def _unwritable(root: Path) -> str:
    """Why nothing can be written into the folder; empty if something can."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _temporary_root() -> Path:
    """This user's cache in the temporary folder; the same at each start, so that restarts do not fill the disk."""
    return Path(tempfile.gettempdir()).resolve() / f"carousel-cache-{os.getuid()}"


def _is_ours(folder: Path) -> bool:
    """Whether the folder exists and only this user can write it: in /tmp, anyone could have made it."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
