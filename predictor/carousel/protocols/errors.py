"""Every failure in one neutral form, and that form in each protocol's own words.

:func:`describe` decides status and codes once; the ``*_error_body`` functions only dress them. Nothing of an unexpected
exception's text reaches a client: it may hold paths or prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import Any

from carousel.engine.errors import (
    SHUT_DOWN,
    CarouselError,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
    RequestTooLong,
)


class UnknownModel(CarouselError):
    """No model (or version of it) of that name is served here.

    Args:
        name: what the client asked for.
        served: the names that exist.
    """

    def __init__(self, name: str, served: Sequence[str]) -> None:
        self.name = name
        self.served = tuple(served)
        shown = name if len(name) <= 120 else name[:119] + "…"
        super().__init__(f"model {shown!r} is not served here; served: {', '.join(served)}")


class RequestCancelled(CarouselError):
    """The request was cancelled before its end, in a protocol that cannot carry a partial answer."""


class RequestTimedOut(CarouselError):
    """The request's own deadline passed, in a protocol that cannot carry a partial answer."""


class BodyTooLarge(CarouselError):
    """The request body is larger than the server takes. ``limit_bytes`` is the bound."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        super().__init__(f"the request body is larger than {limit_bytes} bytes")


class BodyTooSlow(CarouselError):
    """The request body did not arrive in time. ``seconds`` is the bound."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"the request body did not arrive within {seconds:g} s")


class UnsupportedMediaType(CarouselError):
    """The body is not plain JSON by its own declaration."""

    def __init__(self, given: str, header: str = "content-type", allowed: str = "application/json") -> None:
        super().__init__(f"{header}: got {given[:120]!r}, allowed: {allowed}")


class AuthenticationFailed(CarouselError):
    """No API key was shown, or none that is valid. The message never holds a key."""


class QuotaExceeded(CarouselError):
    """The tenant has used up what it may have for now.

    Args:
        message: whose, which, and when again.
        quota: ``requests``, ``tokens`` (a minute) or ``concurrent``.
        retry_after_s: seconds until the same request may be taken.
        reset_s: seconds until the whole quota is there again.
    """

    def __init__(self, message: str, quota: str, retry_after_s: float, reset_s: float) -> None:
        self.quota, self.retry_after_s, self.reset_s = quota, retry_after_s, reset_s
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """One failure, for any protocol.

    ``status`` is the HTTP status, ``grpc_code`` a member name of ``grpc.StatusCode``; ``type`` and ``code`` are
    OpenAI's; ``field`` is the offending field in the client's spelling, if there is one; ``headers`` go on the
    response.
    """

    status: int
    grpc_code: str
    type: str
    code: str | None
    message: str
    field: str | None = None
    headers: Mapping[str, str] = dataclass_field(default_factory=dict)


def retry_after(seconds: float) -> str:
    """``Retry-After`` wants whole seconds; at least one, at most an hour, whatever was estimated."""
    if not math.isfinite(seconds):
        return "3600"
    return str(min(3600, max(1, math.ceil(seconds))))


def _printable(text: str) -> str:
    """A field or value may hold a lone surrogate, which no encoder takes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _finished_early(error: BaseException) -> ErrorInfo | None:
    message = str(error)
    if isinstance(error, RequestTimedOut):
        return ErrorInfo(504, "DEADLINE_EXCEEDED", "timeout_error", "request_timeout", message)
    if isinstance(error, RequestCancelled):
        return ErrorInfo(499, "CANCELLED", "cancelled_error", "request_cancelled", message)
    if isinstance(error, GenerationFailed) and SHUT_DOWN in message:
        headers = {"Retry-After": retry_after(EngineUnavailable("").retry_after_s)}
        return ErrorInfo(503, "UNAVAILABLE", "unavailable_error", "engine_unavailable", message, None, headers)
    if isinstance(error, GenerationFailed):
        return ErrorInfo(500, "INTERNAL", "server_error", "generation_failed", message)
    return None


def describe(error: BaseException, *, invalid_status: int = 400) -> ErrorInfo:
    """What to tell a client about ``error``.

    Args:
        error: anything that was raised; what this module does not know becomes a plain 500 that says nothing.
        invalid_status: HTTP status of an invalid field; the generate protocol uses 422.
    """
    message = _printable(str(error))
    if isinstance(error, InvalidRequest):
        code = "context_length_exceeded" if isinstance(error, RequestTooLong) else "invalid_value"
        name = _printable(error.field)
        return ErrorInfo(invalid_status, "INVALID_ARGUMENT", "invalid_request_error", code, message, name)
    if isinstance(error, UnknownModel):
        return ErrorInfo(404, "NOT_FOUND", "invalid_request_error", "model_not_found", message, "model")
    if isinstance(error, BodyTooLarge):
        return ErrorInfo(413, "RESOURCE_EXHAUSTED", "invalid_request_error", "body_too_large", message)
    if isinstance(error, BodyTooSlow):
        return ErrorInfo(408, "DEADLINE_EXCEEDED", "invalid_request_error", "body_too_slow", message)
    if isinstance(error, UnsupportedMediaType):
        return ErrorInfo(415, "INVALID_ARGUMENT", "invalid_request_error", "unsupported_media_type", message)
    if isinstance(error, AuthenticationFailed):
        headers = {"WWW-Authenticate": "Bearer"}
        return ErrorInfo(401, "UNAUTHENTICATED", "authentication_error", "invalid_api_key", message, None, headers)
    if isinstance(error, QuotaExceeded):
        headers = {"Retry-After": retry_after(error.retry_after_s), "RateLimit-Reset": retry_after(error.reset_s)}
        return ErrorInfo(429, "RESOURCE_EXHAUSTED", "rate_limit_error", "rate_limit_exceeded", message, None, headers)
    if isinstance(error, QueueFull):
        headers = {"Retry-After": retry_after(error.retry_after_s)}
        return ErrorInfo(429, "RESOURCE_EXHAUSTED", "overloaded_error", "queue_full", message, None, headers)
    if isinstance(error, EngineUnavailable):
        headers = {"Retry-After": retry_after(error.retry_after_s)}
        return ErrorInfo(503, "UNAVAILABLE", "unavailable_error", "engine_unavailable", message, None, headers)
    early = _finished_early(error)
    if early is not None:
        return early
    return ErrorInfo(
        500, "INTERNAL", "server_error", "internal_error", "internal error; the server's log has the cause"
    )


def v1_error_body(info: ErrorInfo) -> dict[str, Any]:
    """``{"error": message}``, as KServe's V1 answers."""
    return {"error": info.message}


def v2_error_body(info: ErrorInfo) -> dict[str, Any]:
    """``{"error": message}``, as the Open Inference Protocol has it (``infer`` and ``generate``)."""
    return {"error": info.message}


def openai_error_body(info: ErrorInfo) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    message = info.message
    if info.code == "context_length_exceeded":
        message += ". This model's maximum context length is exceeded."  # words that libraries look for
    return {"error": {"message": message, "type": info.type, "param": info.field, "code": info.code}}
