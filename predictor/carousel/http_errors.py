"""Errors over HTTP: one exception handler set that answers each protocol in its own form."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from kserve import errors as kserve_errors
from starlette.exceptions import HTTPException

from carousel.engine.errors import CarouselError
from carousel.lifecycle import RETRY_LOADING_S
from carousel.protocols.common import json_bytes
from carousel.protocols.errors import ErrorInfo, describe, openai_error_body, retry_after, v2_error_body

logger = logging.getLogger("carousel.http")

OPENAI_PREFIXES = (
    "/openai/", "/v1/chat/", "/v1/completions", "/tokenize", "/detokenize", "/v1/tokenize", "/v1/detokenize",
)  # fmt: skip
_BY_STATUS = {
    400: ("INVALID_ARGUMENT", "invalid_request_error"),
    401: ("UNAUTHENTICATED", "authentication_error"),
    403: ("PERMISSION_DENIED", "permission_error"),
    404: ("NOT_FOUND", "invalid_request_error"),
    405: ("UNIMPLEMENTED", "invalid_request_error"),
    413: ("RESOURCE_EXHAUSTED", "invalid_request_error"),
    415: ("INVALID_ARGUMENT", "invalid_request_error"),
    422: ("INVALID_ARGUMENT", "invalid_request_error"),
    429: ("RESOURCE_EXHAUSTED", "overloaded_error"),
    501: ("UNIMPLEMENTED", "invalid_request_error"),
    503: ("UNAVAILABLE", "unavailable_error"),
}


def info_of_status(status: int, message: str, **headers: str) -> ErrorInfo:
    """An :class:`ErrorInfo` for a bare HTTP status."""
    grpc_code, kind = _BY_STATUS.get(status, ("INTERNAL", "server_error"))
    return ErrorInfo(status, grpc_code, kind, None, message, None, headers)


def describe_any(error: BaseException, path: str = "") -> ErrorInfo:
    """What to tell a client about any exception, kserve's and starlette's own included.

    Args:
        error: what was raised.
        path: the request's path: ``generate`` answers an invalid field with 422, the others with 400.
    """
    if isinstance(error, CarouselError):
        is_generate = path.endswith(("/generate", "/generate_stream"))
        return describe(error, invalid_status=422 if is_generate else 400)
    if isinstance(error, HTTPException):
        return info_of_status(error.status_code, str(error.detail), **(error.headers or {}))
    if isinstance(error, RequestValidationError):
        return info_of_status(400, "; ".join(_validation_message(item) for item in error.errors()[:5]))
    if isinstance(error, (kserve_errors.ModelNotReady, kserve_errors.ServerNotReady, kserve_errors.ServerNotLive)):
        headers = {"Retry-After": retry_after(RETRY_LOADING_S)}
        return info_of_status(503, str(error), **headers)
    if isinstance(error, kserve_errors.ModelNotFound):
        return info_of_status(404, str(error))
    if isinstance(error, kserve_errors.InvalidInput):
        return info_of_status(400, str(error))
    if isinstance(error, (kserve_errors.UnsupportedProtocol, NotImplementedError)):
        return info_of_status(501, str(error) or "not implemented")
    return describe(error)


def _validation_message(item: dict[str, Any]) -> str:
    """``body.inputs.0.shape: Field required``; never the value, which may be the prompt."""
    place = ".".join(str(part) for part in item.get("loc", ()) if part != "body") or "body"
    return f"{place}: {item.get('msg', 'invalid')}"


def error_body(path: str, info: ErrorInfo) -> dict[str, Any]:
    """The error in the form of the protocol that ``path`` belongs to."""
    if path.startswith(OPENAI_PREFIXES):
        return openai_error_body(info)
    return v2_error_body(info)


def error_response(path: str, error: BaseException) -> Response:
    """The whole HTTP answer to an exception."""
    info = describe_any(error, path)
    headers = dict(info.headers)
    return Response(json_bytes(error_body(path, info)), info.status, headers, media_type="application/json")


async def _handle(request: Request, error: Exception) -> Response:
    response = error_response(request.url.path, error)
    # A deadline that the client set, a queue that is full, a server that drains: nobody has to look into those.
    if describe_any(error).grpc_code == "INTERNAL":
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return response


def add_handlers(app: FastAPI) -> None:
    """Install the handlers over whatever was there. Unknown exceptions are left to the request layer, which logs."""
    for kind in (
        CarouselError,
        HTTPException,
        RequestValidationError,
        kserve_errors.InvalidInput,
        kserve_errors.InferenceError,
        kserve_errors.ModelNotFound,
        kserve_errors.ModelNotReady,
        kserve_errors.ServerNotLive,
        kserve_errors.ServerNotReady,
        kserve_errors.UnsupportedProtocol,
        NotImplementedError,
    ):
        app.add_exception_handler(kind, _handle)
