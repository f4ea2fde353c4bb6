"""Bodies are bounded, finite JSON, and answers are always valid JSON."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carousel.engine.errors import InvalidRequest
from carousel.protocols import jsonio

DEEP = jsonio.MAX_DEPTH + 40

BAD_BODIES = {
    "empty": (b"", "valid JSON"),
    "truncated": (b'{"a": [1, 2', "valid JSON"),
    "two documents": (b"{} {}", "valid JSON"),
    "latin-1": ('{"a": "é"}'.encode("latin-1"), "UTF-8 (byte 7"),
    "NaN": (b'{"a": NaN}', "NaN"),
    "Infinity": (b"[Infinity]", "Infinity"),
    "-Infinity": (b"[-Infinity]", "Infinity"),
    "5000 digits": (b'{"a": ' + b"9" * 5000 + b"}", "numbers of ordinary size"),
    "deep list": (b"[" * DEEP + b"]" * DEEP, "nested at most"),
    "deep object": (b'{"a":' * DEEP + b"1" + b"}" * DEEP, "nested at most"),
    "very deep": (b"[" * 200_000, "nested at most"),
}


@pytest.mark.parametrize("case", BAD_BODIES)
def test_bad_bodies_are_refused_with_a_short_reason(case):
    raw, reason = BAD_BODIES[case]
    with pytest.raises(InvalidRequest) as caught:
        jsonio.decode_body(raw)
    assert caught.value.field == "body"
    assert reason in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("raw", [b'{"a": 1, "a": 2}', b'[{"b": {"x": 1, "a": [], "a": []}}]'])
def test_a_field_given_twice_is_refused_by_name(raw):
    with pytest.raises(InvalidRequest, match=r"^a: got .*given twice"):
        jsonio.decode_body(raw)


def test_good_bodies_are_read():
    assert jsonio.decode_body(b'{"a": [1, 2.5, null, true, "\xc3\xa9"]}') == {"a": [1, 2.5, None, True, "é"]}
    wide = {"rows": [[i] for i in range(500)], "flat": {str(i): {} for i in range(500)}}
    assert jsonio.decode_body(json.dumps(wide).encode()) == wide
    limit = jsonio.MAX_DEPTH
    assert jsonio.decode_body(b"[" * limit + b"]" * limit)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_what_is_written_is_read_back(value):
    assert jsonio.decode_body(jsonio.json_bytes(value)) == value


@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_refused(raw):
    try:
        value = jsonio.decode_body(raw)
    except InvalidRequest as error:
        value = error.field
    assert value == "body" or jsonio.decode_body(jsonio.json_bytes(value)) == value


def test_a_surrogate_never_breaks_an_answer():
    assert json.loads(jsonio.json_bytes({"a": "x\ud800"})) == {"a": "x\ud800"}


def test_nan_is_never_written():
    with pytest.raises(ValueError, match="JSON compliant"):
        jsonio.dumps({"a": math.nan})


@pytest.mark.parametrize(
    ("value", "sent"), [(-1.5, -1.5), (None, None), (-math.inf, -9999.0), (math.nan, -9999.0), (-1e30, -9999.0), (0, 0)]
)
def test_log_probabilities_stay_finite(value, sent):
    assert jsonio.finite_logprob(value) == sent


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (10**5000, "an integer of 16610 bits"),
        (True, "True"),
        (7, "7"),
        ([1, "a"], "[1, 'a']"),
        ([[]], "a list of 1 items"),
        ([0] * 10**6, "a list of 1000000 items"),
        ({"a": 1}, "an object with 1 fields"),
        (object, "a value of type type"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_values_are_shown_briefly(value, shown):
    assert repr(jsonio.brief(value)) == shown


def test_long_text_is_shown_by_its_beginning():
    assert len(repr(jsonio.brief("é" * 10**6))) < 250
