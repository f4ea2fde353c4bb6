"""Unloading, where it is switched on; and what a server refuses to be started with."""

from __future__ import annotations

import signal
import socket
import time

import httpx
import pytest
from kserve import Model
from tests.server.fake_engine import fake_factory

from carousel.config import Settings
from carousel.lifecycle import Lifecycle
from carousel.predictor import CarouselModel
from carousel.serving import CarouselServer


def test_an_allowed_unload_drains_and_leaves_the_server_up(spawn):
    server = spawn(unload=1, drain=60)
    server.wait_ready()
    with httpx.Client(base_url=server.url, timeout=10) as client:
        assert client.post("/v2/repository/models/fake/unload").json() == {"name": "fake", "unload": True}
        assert client.get("/v2/models/fake/ready").status_code == 503
        assert client.get("/livez").json() == {"status": "alive", "state": "stopped"}
        refused = client.post("/v2/models/fake/generate", json={"text_input": "a"})
        assert refused.status_code == 503
        assert client.post("/v2/repository/models/fake/load").status_code == 503
        assert client.get("/metrics").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    code, log = server.finish()
    assert code == 0, log


@pytest.fixture
def unstarted():
    settings = Settings(model="fake", model_name="fake")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield CarouselServer(settings, Lifecycle(settings, fake_factory()), listening, time.time())


def test_more_workers_than_one_are_refused_with_the_reason(unstarted):
    unstarted.workers = 2
    with pytest.raises(ValueError, match="load the model once per process"):
        unstarted.start([CarouselModel("fake", unstarted.lifecycle)])


def test_other_models_are_refused(unstarted):
    with pytest.raises(ValueError, match="exactly one CarouselModel"):
        unstarted.start([Model("other")])
    with pytest.raises(ValueError, match="exactly one CarouselModel"):
        unstarted.start([])
