"""Triton's own gRPC client, unchanged: its stream API (blocking and asyncio), configuration, compression.

In a process of its own, for its copy of the protocol and KServe's refuse to share one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.server.harness import wait_until

from carousel.engine.request import FinishReason


@pytest.fixture(scope="module")
def seen(server) -> dict:
    server.engine.delay_s = 0.002
    script = Path(__file__).parent / "triton_stream_client.py"
    done = subprocess.run(
        [sys.executable, str(script), server.grpc],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    wait_until(lambda: not server.engine.live)
    ended = [stream.ended for stream in server.engine.ended]
    return {**json.loads(done.stdout), "cancelled": ended.count(FinishReason.CANCELLED)}


def words(count: int) -> str:
    return "".join(f"w{i} " for i in range(count))


def test_the_stream_api(seen):
    """kserve#3402, #2788: streaming."""
    stream = seen["stream"]
    assert stream["texts"] == {"one": words(3), "two": words(5)}
    assert stream["reasons"] == ["length", "length"]
    assert stream["ends"] == [["one", 2], ["two", 0]], "an empty final response where it was asked for"
    bad, lost = stream["errors"]
    assert bad.startswith("[request id: bad] parameters.temperature: got -0.5, allowed: ")
    assert lost == "[request id: lost] model 'other' is not served here; served: fake"
    assert stream["left"] == 0


def test_stop_stream_cancels_what_runs(seen):
    assert seen["cancelled"] >= 1


def test_the_asyncio_stream_api(seen):
    assert seen["aio"]["texts"] == {f"r{i}": words(2 + i) for i in range(3)}
    (error,) = seen["aio"]["errors"]
    assert error.startswith("[request id: bad] parameters.top_p: got 7.0, allowed: ")
    assert seen["aio"]["cancelled"] is True


def test_configuration_and_metadata(seen):
    config = seen["config"]
    assert (config["name"], config["decoupled"], config["max_batch_size"]) == ("fake", True, 0)
    assert config["inputs"] == [["text_input", "TYPE_STRING", [-1]]]
    assert config["outputs"]["text_output"] == "TYPE_STRING"
    assert config["outputs"]["completion_tokens"] == "TYPE_INT32"
    assert seen["statistics"] == [[["fake", "1", 2]]] * 2, "of one model and of all: the two streams that ended"
    assert seen["index"] == [["fake", "1", "READY"]]
    assert seen["server"][0] == "carousel"
    assert "binary_tensor_data" in seen["server"][1]
    assert seen["model"] == ["fake", "carousel", [["text_input", "BYTES", [-1]]]]


def test_what_does_not_exist_says_so(seen):
    for name in ("unknown_config", "unknown_version", "unknown_ready", "unknown_statistics"):
        assert seen[name].startswith("[StatusCode.NOT_FOUND]"), seen[name]
    assert seen["shared_memory"].startswith("[StatusCode.UNIMPLEMENTED]")


def test_compression(seen):
    assert seen["gzip"] == seen["deflate"] == ["w0 ", 2000]
