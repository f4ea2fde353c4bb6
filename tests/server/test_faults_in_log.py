"""What is logged as a fault, with a traceback: what somebody has to look into, and nothing that a client asked for."""

from __future__ import annotations

import logging

import pytest
from fastapi import FastAPI
from kserve.errors import InferenceError, ModelNotReady
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient

from carousel.engine.errors import EngineUnavailable, GenerationFailed, InvalidRequest, QueueFull
from carousel.http_errors import add_handlers
from carousel.protocols.errors import RequestCancelled, RequestTimedOut


@pytest.mark.parametrize(
    ("error", "status", "is_fault"),
    [
        (RequestTimedOut("the timeout passed"), 504, False),
        (RequestCancelled("cancelled"), 499, False),
        (EngineUnavailable("draining"), 503, False),
        (QueueFull("full", 3), 429, False),
        (InvalidRequest("n", 0, "1"), 400, False),
        (ModelNotReady("m"), 503, False),
        (NotImplementedError("such a method"), 501, False),
        (HTTPException(404), 404, False),
        (GenerationFailed("the engine has failed"), 500, True),
        (InferenceError("oops"), 500, True),
    ],
)
def test_only_faults_are_logged_as_such(
    error: Exception, status: int, is_fault: bool, caplog: pytest.LogCaptureFixture
) -> None:
    app = FastAPI()
    add_handlers(app)

    @app.post("/v1/completions")
    async def completions() -> None:
        raise error

    with caplog.at_level(logging.WARNING, logger="carousel.http"):
        answer = TestClient(app).post("/v1/completions")
    assert answer.status_code == status
    assert [record.levelname for record in caplog.records if record.name == "carousel.http"] == ["ERROR"] * is_fault
