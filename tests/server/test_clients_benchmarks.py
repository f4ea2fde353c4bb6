"""Conformance: ``guidellm`` and ``aiperf``, which measure any OpenAI server, unchanged, in environments of their own.

``make clients`` makes those; without them the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.engine.tiny import byte_tokenizer
from tests.server.tiny_server import MODEL, TinyServer, tiny_server

CLIENTS = Path(__file__).resolve().parents[2] / ".clients"
REQUESTS, STREAMS, OUTPUT = 6, 2, 5
SECONDS = 90  # the clients load for 5 to 10 s before their first request


@pytest.fixture(scope="module")
def tiny() -> Iterator[TinyServer]:
    with tiny_server() as server:
        yield server


def client(name: str) -> Callable[..., None]:
    """Runs the client with arguments in a folder; fails with what it printed."""
    program = CLIENTS / name / "bin" / name
    if not program.exists():
        pytest.skip(f"{name} is not installed in .clients: make clients")

    def run(*arguments: object, cwd: Path) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "PYTHON"))}
        command = [str(program), *map(str, arguments)]
        result = subprocess.run(
            command, cwd=cwd, env={**environment, "HOME": str(cwd), "COLUMNS": "200"}, timeout=SECONDS,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout[-4000:]

    return run


def generated(server: TinyServer) -> int:
    """Tokens that the server has generated, from its metrics."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith("carousel_generation_tokens_total"))


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
def test_guidellm(tiny, tmp_path, route):
    run = client("guidellm")
    lines = [json.dumps({"prompt": f"count to {n}", "output_tokens_count": OUTPUT}) for n in range(REQUESTS)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines), "utf-8")
    before = generated(tiny)
    run(
        "run", "--backend", f"kind=openai_http,target={tiny.url},model={MODEL},request_format={route}",
        "--profile", f"kind=concurrent,streams={STREAMS}", "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--data", "kind=json_file,path=prompts.jsonl", "--output", "kind=json,path=out.json",
        "--disable-console", cwd=tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "out.json").read_text("utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    assert benchmark["metrics"]["output_token_count"]["successful"]["total_sum"] == REQUESTS * OUTPUT
    assert benchmark["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0
    assert generated(tiny) - before == REQUESTS * OUTPUT


def test_aiperf(tiny, tmp_path):
    run = client("aiperf")
    byte_tokenizer().backend.save(str(tmp_path / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    before = generated(tiny)
    run(
        "profile", "--model", MODEL, "--url", tiny.url, "--endpoint-type", "chat", "--streaming",
        "--tokenizer", tmp_path, "--concurrency", STREAMS, "--request-count", REQUESTS,
        "--synthetic-input-tokens-mean", 12, "--synthetic-input-tokens-stddev", 0,
        "--output-tokens-mean", OUTPUT, "--output-tokens-stddev", 0, "--extra-inputs", "ignore_eos:true",
        "--use-server-token-count", "--output-artifact-dir", "out", "--ui", "none", cwd=tmp_path,
    )  # fmt: skip
    found = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text("utf-8"))
    assert found["request_count"]["avg"] == REQUESTS
    assert found["request_error_rate"]["avg"] == 0
    assert found["output_sequence_length"]["avg"] == OUTPUT
    assert found["time_to_first_token"]["avg"] > 0
    assert generated(tiny) - before == REQUESTS * OUTPUT
    scraped = (tmp_path / "out" / "server_metrics_export.json").read_text("utf-8")
    assert "carousel_num_requests_running" in scraped  # it reads our /metrics beside the load
