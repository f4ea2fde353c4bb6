"""JSON in and out, strictly: what comes in is bounded and finite, what goes out is always valid.

The standard library's parser accepts NaN, any depth and lone surrogates, and its writer emits them. Here neither
happens.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from carousel.engine.errors import InvalidRequest

MAX_DEPTH = 64
_SMALLEST_LOGPROB = -9999.0  # what OpenAI sends for "practically impossible"; JSON has no -Infinity

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class _Shown:
    """A value as the message shall show it: ``InvalidRequest`` prints ``repr(value)``."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def brief(value: object) -> object:
    """``value``, or a stand-in with a short ``repr`` where the true one would be long, deep or refused by Python."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int):
        return value if value.bit_length() <= 256 else _Shown(f"an integer of {value.bit_length()} bits")
    if isinstance(value, (str, bytes)):
        return value if len(value) <= 200 else value[:200]
    if isinstance(value, (list, tuple)):
        if len(value) <= 4 and all(item is None or isinstance(item, (bool, int, float, str)) for item in value):
            return _Shown("[" + ", ".join(repr(brief(item)) for item in value) + "]")
        return _Shown(f"a list of {len(value)} items")
    if isinstance(value, dict):
        return _Shown(f"an object with {len(value)} fields")
    return _Shown(f"a value of type {type(value).__name__}")


def refuse(field: str, value: object, allowed: str) -> NoReturn:
    """Raise ``InvalidRequest`` for ``field`` (the client's spelling), with the value shortened safely."""
    raise InvalidRequest(field, brief(value), allowed)


def _no_constant(name: str) -> NoReturn:
    raise InvalidRequest("body", _Shown(name), "JSON, which has no NaN and no Infinity")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the body. Of a name given twice the last would win silently, and which one counts is a guess."""
    fields = dict(pairs)
    if len(fields) != len(pairs):
        seen: set[str] = set()
        for name, value in pairs:
            if name in seen:
                refuse(name if len(name) <= 80 else name[:79] + "…", value, "each field once; this one is given twice")
            seen.add(name)
    return fields


def _check_depth(value: object) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        deeper: list[Any] = []
        for item in level:
            children = item.values() if isinstance(item, dict) else item
            deeper.extend(child for child in children if isinstance(child, (dict, list)))
        if not deeper:
            return
        level = deeper
    refuse("body", _Shown("deeper nesting"), f"JSON nested at most {MAX_DEPTH} deep")


def decode_body(raw: bytes) -> object:
    """Parse a request body.

    Args:
        raw: the body's bytes, UTF-8; the caller has bounded its size.

    Raises:
        InvalidRequest: field ``body``; not UTF-8, not JSON, NaN or Infinity, an absurd number, or nested too deep.
            Where an object has a field twice, that field.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest("body", raw[error.start : error.end], f"UTF-8 (byte {error.start} is not)") from None
    try:
        value: object = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except InvalidRequest:
        raise
    except json.JSONDecodeError as error:
        shown = text[error.pos : error.pos + 20] if text.strip() else ""
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest("body", shown, f"valid JSON ({error.msg.lower()} at {where})") from None
    except RecursionError:
        refuse("body", _Shown("deeper nesting"), f"JSON nested at most {MAX_DEPTH} deep")
    except ValueError:  # Python bounds the digits of an integer it converts
        refuse("body", _Shown("an integer of thousands of digits"), "JSON with numbers of ordinary size")
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    return value


def dumps(value: Any) -> str:
    """Compact JSON. ``value`` holds no NaN and no infinity (see :func:`finite_logprob`)."""
    return _ENCODER.encode(value)


def json_bytes(value: Any) -> bytes:
    """Compact JSON as UTF-8. A lone surrogate, should one ever get here, comes out as its JSON escape."""
    return _ENCODER.encode(value).encode("utf-8", "backslashreplace")


def finite_logprob(value: float | None) -> float | None:
    """A log probability that JSON can carry: minus infinity and NaN become -9999."""
    if value is None or (math.isfinite(value) and value > _SMALLEST_LOGPROB):
        return value
    return _SMALLEST_LOGPROB
