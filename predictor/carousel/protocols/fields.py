"""Reading untrusted objects field by field: types, unknown names, where each value stood.

:data:`Values` maps a field's name to where the client wrote it and what: ``{"top_p": ("parameters.top_p", 0.9)}``. Two
sources merge as dictionaries do, and every later message still names the true place. A JSON ``null`` counts as absent.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import TypeAlias

from carousel.protocols.jsonio import refuse

Values: TypeAlias = dict[str, tuple[str, object]]

MAX_BIASES = 4096
_LISTED_NAMES = 40  # a message that lists more helps nobody


def join(path: str, name: str) -> str:
    """``parameters`` and ``stop`` -> ``parameters.stop``; at the top just ``stop``. Names are shortened."""
    shown = name if len(name) <= 80 else name[:79] + "…"
    return f"{path}.{shown}" if path else shown


def refuse_unknown(path: str, name: str, value: object, known: Collection[str], hint: str = "") -> None:
    """Raise for a field that no table knows, with the nearest known name."""
    close = difflib.get_close_matches(name[:80], known, n=1, cutoff=0.7)
    if close:
        refuse(join(path, name), value, f"no field of this name; did you mean {close[0]!r}?")
    if not hint and len(known) <= _LISTED_NAMES:
        hint = "; known: " + ", ".join(sorted(known))
    refuse(join(path, name), value, f"no field of this name{hint}")


def read_object(value: object, path: str, known: Collection[str], *, hint: str = "") -> Values:
    """The fields of a JSON object that are not null.

    Args:
        value: what should be an object.
        path: where it stands, ``""`` at the top of the body.
        known: every name that may appear.
        hint: said after "no field of this name" instead of the list of known names.

    Raises:
        InvalidRequest: not an object, or an unknown name.
    """
    if not isinstance(value, dict):
        refuse(path or "body", value, "a JSON object")
    values: Values = {}
    for name, item in value.items():
        if name not in known:
            refuse_unknown(path, str(name), item, known, hint)
        if item is not None:
            values[name] = (join(path, name), item)
    return values


def text(path: str, value: object, allowed: str = "a string", *, max_length: int | None = None) -> str:
    """A string that UTF-8 can carry, of at most ``max_length`` characters."""
    if not isinstance(value, str) or (max_length is not None and len(value) > max_length):
        refuse(path, value, allowed)
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            refuse(path, value[error.start : error.start + 1], "valid Unicode, no lone surrogates")
    return value


def boolean(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        refuse(path, value, "true or false")
    return value


def integer(path: str, value: object, low: int, high: int, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        refuse(path, value, allowed)
    return value


def number(path: str, value: object, low: float, high: float, allowed: str) -> float:
    """A finite number within [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        refuse(path, value, allowed)  # NaN fails the comparison
    return float(value)


def strings(path: str, value: object, allowed: str, most: int) -> tuple[str, ...]:
    """One string, or a list of at most ``most``."""
    if isinstance(value, str):
        return (text(path, value, allowed),)
    if not isinstance(value, list):
        refuse(path, value, allowed)
    if len(value) > most:
        refuse(path, value, f"{allowed}, at most {most}")
    return tuple(text(f"{path}[{index}]", item, allowed) for index, item in enumerate(value))


def token_ids(path: str, value: object, vocab_size: int) -> list[int]:
    """A list of token ids below ``vocab_size``."""
    allowed = f"a list of token ids from 0 to {vocab_size - 1}"
    if not isinstance(value, list):
        refuse(path, value, allowed)
    for index, item in enumerate(value):
        if type(item) is not int or not 0 <= item < vocab_size:  # the type is exact: bool is an int in Python
            refuse(f"{path}[{index}]", item, f"token ids from 0 to {vocab_size - 1}")
    return value


def logit_bias(path: str, value: object, vocab_size: int) -> dict[int, float]:
    """``{"token id": bias}``; JSON writes keys as strings."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        refuse(path, value, f"an object that maps at most {MAX_BIASES} token ids to biases")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        shown = str(key)
        if not (shown.isascii() and shown.isdigit() and len(shown) <= 10 and int(shown) < vocab_size):
            refuse(path, key, f"token ids from 0 to {vocab_size - 1} as keys")
        biases[int(shown)] = number(f"{path}[{shown}]", bias, -100, 100, "a number from -100 to 100")
    return biases


def from_text(value: object, kind: str) -> object:
    """A number or boolean out of a string, for carriers that know strings only; anything else comes back unchanged.

    Args:
        value: as received; strings like ``"0.7"``, ``"20"`` or ``"true"`` are converted.
        kind: ``number``, ``integer`` or ``boolean``.
    """
    if not isinstance(value, str) or len(value) > 40:
        return value
    if kind == "boolean":
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    try:
        converted = int(value) if kind == "integer" else float(value)
    except ValueError:
        return value
    return converted if math.isfinite(converted) else value


def pick(values: Mapping[str, tuple[str, object]], spellings: tuple[str, ...]) -> tuple[str, object] | None:
    """What the client gave under any of ``spellings``: (path, value) or None.

    Raises:
        InvalidRequest: two spellings of one field that contradict each other.
    """
    found = [values[name] for name in spellings if name in values]
    if not found:
        return None
    path, value = found[0]
    for other_path, other in found[1:]:
        if type(other) is not type(value) or other != value:
            refuse(other_path, other, f"the same value as {path}, which means the same field")
    return path, value
