"""Files that may change under a running server: certificates, keys, mounted secrets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

RELOAD_SECONDS = 1.0
"""How often a watched file is looked at; a look is a few ``stat`` calls."""

Signature = tuple[tuple[str, int, int, int, int], ...]


def expand(path: Path) -> list[Path]:
    """The files behind a path: itself, or, for a directory, the plain files in it whose names do not begin with a dot.

    Kubernetes mounts a secret as links ``name -> ..data/name`` and swaps ``..data``: names with a dot are its own.

    Raises:
        OSError: the directory cannot be read.
    """
    if not path.is_dir():
        return [path]
    return sorted(item for item in path.iterdir() if not item.name.startswith(".") and item.is_file())


def signature(paths: Iterable[Path]) -> Signature:
    """What changes when one of the files does, through links too. A file that is not there counts as such."""
    found = []
    for path in paths:
        try:
            for file in expand(path):
                stat = file.stat()
                found.append((str(file), stat.st_dev, stat.st_ino, stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append((str(path), 0, 0, 0, -1))
    return tuple(found)


class FileWatch:
    """Says whether files have changed since the last question.

    Args:
        paths: files or directories.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._seen = signature(self._paths)

    def changed(self) -> bool:
        """Whether anything is different from the last time."""
        now = signature(self._paths)
        if now == self._seen:
            return False
        self._seen = now
        return True
