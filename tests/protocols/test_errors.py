"""Each failure has one status, one gRPC code and one body per protocol."""

from __future__ import annotations

import json

import grpc
import pytest

from carousel.engine.errors import (
    SHUT_DOWN,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    RequestTooLong,
)
from carousel.protocols import errors

CASES = [
    (InvalidRequest("top_p", 7, "a number > 0"), 400, "INVALID_ARGUMENT", "invalid_value", "top_p"),
    (RequestTooLong("prompt", "9 tokens", "at most 8"), 400, "INVALID_ARGUMENT", "context_length_exceeded", "prompt"),
    (errors.UnknownModel("x" * 500, ["demo"]), 404, "NOT_FOUND", "model_not_found", "model"),
    (errors.BodyTooLarge(10), 413, "RESOURCE_EXHAUSTED", "body_too_large", None),
    (errors.UnsupportedMediaType("text/xml"), 415, "INVALID_ARGUMENT", "unsupported_media_type", None),
    (QueueFull("512 requests wait", 2.2), 429, "RESOURCE_EXHAUSTED", "queue_full", None),
    (EngineUnavailable("draining", 0.0), 503, "UNAVAILABLE", "engine_unavailable", None),
    (GenerationFailed("out of memory"), 500, "INTERNAL", "generation_failed", None),
    (GenerationFailed(SHUT_DOWN), 503, "UNAVAILABLE", "engine_unavailable", None),
    (errors.AuthenticationFailed("no key"), 401, "UNAUTHENTICATED", "invalid_api_key", None),
    (errors.RequestTimedOut("late"), 504, "DEADLINE_EXCEEDED", "request_timeout", None),
    (errors.RequestCancelled("gone"), 499, "CANCELLED", "request_cancelled", None),
    (ZeroDivisionError("a secret"), 500, "INTERNAL", "internal_error", None),
]


@pytest.mark.parametrize(("error", "status", "grpc_code", "code", "field"), CASES, ids=lambda case: type(case).__name__)
def test_every_error_has_its_codes_and_bodies(error, status, grpc_code, code, field):
    info = errors.describe(error)
    assert (info.status, info.grpc_code, info.code, info.field) == (status, grpc_code, code, field)
    assert hasattr(grpc.StatusCode, info.grpc_code)
    assert errors.v1_error_body(info) == errors.v2_error_body(info) == {"error": info.message}
    inner = errors.openai_error_body(info)["error"]
    # litellm tells a prompt that is too long from other errors by these words, not by the code
    too_long = ". This model's maximum context length is exceeded." if code == "context_length_exceeded" else ""
    assert inner == {"message": info.message + too_long, "type": info.type, "param": field, "code": code}
    assert len(info.message) < 400


def test_generate_answers_an_invalid_field_with_422_and_nothing_else():
    assert errors.describe(InvalidRequest("f", 1, "2"), invalid_status=422).status == 422
    assert errors.describe(QueueFull("full", 1.0), invalid_status=422).status == 429


def test_an_unexpected_exception_tells_the_client_nothing():
    assert "secret" not in errors.describe(ZeroDivisionError("a secret")).message


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, "1"), (0.2, "1"), (2.2, "3"), (1e9, "3600"), (float("inf"), "3600")]
)
def test_retry_after_is_whole_seconds_within_bounds(seconds, header):
    for error in (QueueFull("full", seconds), EngineUnavailable("down", seconds)):
        assert errors.describe(error).headers == {"Retry-After": header}


def test_surrogates_in_a_field_name_can_be_sent():
    info = errors.describe(InvalidRequest("bad\ud800name", "\udfff", "text"))
    assert json.dumps(errors.openai_error_body(info), ensure_ascii=False).encode("utf-8")
