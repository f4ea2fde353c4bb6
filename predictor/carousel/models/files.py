"""Opening the files of a model, which may come from anybody: only regular files, and none larger than it can mean."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, NoReturn

from .errors import ModelLoadError

MAX_TEXT_BYTES = 64 * 2**20
"""Of a config, an index or a template. Real ones have some MB at most."""


def check_regular(path: Path) -> int:
    """The size of a file in bytes. A link is followed, as the Hub's caches and mounted volumes need.

    Raises:
        ModelLoadError: it is a pipe, a device or a directory, which could block or never end, or cannot be looked at.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror}); check the path and its mode") from error
    if not stat.S_ISREG(status.st_mode):
        raise ModelLoadError(f"{path}: is not a regular file; check what it is or links to")
    return status.st_size


def read_text(path: Path, limit: int = MAX_TEXT_BYTES) -> str:
    """The whole text of a UTF-8 file of at most ``limit`` bytes.

    Raises:
        ModelLoadError: naming the file.
    """
    size = check_regular(path)
    if size > limit:
        raise ModelLoadError(f"{path}: has {size} bytes, at most {limit} make sense; check where it comes from")
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read ({error.strerror}); check the path and its mode") from error
    except UnicodeDecodeError as error:
        raise ModelLoadError(
            f"{path}: is not UTF-8 ({error.reason} at byte {error.start}); download it again"
        ) from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def parse_object(text: str, where: object, *, constants: bool = True) -> dict[str, Any]:
    """A JSON object. ``constants``: whether NaN and Infinity pass, which configs written by Python may hold.

    Raises:
        ModelLoadError: naming ``where``.
    """
    try:
        value = json.loads(text, parse_constant=None if constants else _no_constant)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ModelLoadError(f"{where}: cannot be read as JSON ({why}); download it again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{where}: is not a JSON object; download it again")
    return value
