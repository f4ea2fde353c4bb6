"""What the chart says after an installation, and what `helm test` does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from tests.helm.chart_tools import CHART, KUBE_VERSION, NAMESPACE, RELEASE, Doc, merged, render, run_helm, the
from tests.protocols.protocol_fakes import context

from carousel.protocols import generate

KEDA: Doc = {"autoscaling": {"type": "keda"}}


# --- notes


@pytest.fixture(scope="module")
def with_notes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart with its notes as a ConfigMap too: helm prints them only where there is a cluster."""
    copy = tmp_path_factory.mktemp("chart") / "carousel"
    shutil.copytree(CHART, copy)
    shown = '{{ include (print $.Template.BasePath "/NOTES.txt") . | nindent 4 }}'
    text = "kind: ConfigMap\nmetadata: {name: notes}\ndata:\n  notes: |-\n" + f"    {shown}\n"
    (copy / "templates" / "notes.yaml").write_text(text, "utf-8")
    return copy


def notes(chart: Path, values: Doc) -> str:
    arguments = ("-n", NAMESPACE, "--kube-version", KUBE_VERSION, "--show-only", "templates/notes.yaml", "-f", "-")
    done = run_helm("template", RELEASE, str(chart), *arguments, values=json.dumps(values))
    assert done.returncode == 0, done.stderr
    text: str = yaml.safe_load(done.stdout)["data"]["notes"]
    return text


def test_notes_print_a_call_that_works(with_notes: Path) -> None:
    said = notes(with_notes, {"service": {"port": 8000}})
    assert "port-forward --address 127.0.0.1 service/chat-carousel 8080:8000" in said
    assert "curl -s http://127.0.0.1:8080/v2/models/smollm2/generate" in said
    body = json.loads(said.partition("-d '")[2].partition("'")[0])
    assert generate.parse(body, context()).requests[0].sampling.max_tokens == 16
    assert "whoever reaches the Service may ask" in said


def test_notes_follow_the_values(with_notes: Path) -> None:
    values = {"mode": "inferenceservice", "apiKeys": {"existingSecret": "keys"}, "tls": {"secretName": "cert"}}
    said = notes(with_notes, values)
    assert "wait --for=condition=Ready --timeout=900s inferenceservice/chat-carousel" in said
    assert "service/chat-carousel-predictor 8080:80" in said
    assert "curl -s -k https://127.0.0.1:8080/v2/models/smollm2/generate" in said
    assert '-H "x-api-key: $KEY"' in said
    assert "may ask" not in said
    assert "wakes it" in notes(with_notes, merged(KEDA, {"autoscaling": {"minReplicas": 0}}))


# --- helm test


class _Server(BaseHTTPRequestHandler):
    """As much of a server as `helm test` asks for; ready at the second time of asking."""

    asked: list[tuple[str, str | None]]

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, code: int, body: object) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(code)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        type(self).asked.append((self.path, self.headers.get("x-api-key")))
        if self.path == "/metrics":
            self._answer(200, 'carousel_generation_tokens_total{model_name="m"} 8\n')
        else:
            self._answer(200 if len(type(self).asked) > 1 else 503, {})

    def do_POST(self) -> None:
        type(self).asked.append((self.path, self.headers.get("x-api-key")))
        self.rfile.read(int(self.headers["content-length"]))
        if self.path.startswith("/v2"):
            self._answer(200, {"text_output": "4 5"})
        else:
            self._answer(*type(self).openai)

    openai: tuple[int, object] = (200, {"choices": [{"text": "4 5"}]})


@pytest.fixture
def server() -> Iterator[tuple[str, type[_Server]]]:
    handler = type("Handler", (_Server,), {"asked": []})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_address[1]}", handler
    http.shutdown()
    http.server_close()


def check(url: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    text = script or the(render(), "Pod")["spec"]["containers"][0]["args"][0]
    environment = {"URL": url, "MODEL": "m", "SECONDS": "10", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def test_helm_test_passes_on_a_server_that_answers(server: tuple[str, type[_Server]], tmp_path: Path) -> None:
    url, handler = server
    (tmp_path / "api-keys").mkdir()
    (tmp_path / "api-keys" / "keys").write_text("# ours\n0123456789=gold\n", "utf-8")
    text = the(render(), "Pod")["spec"]["containers"][0]["args"][0]
    done = check(url, text.replace('"/etc/carousel"', repr(str(tmp_path))))
    assert done.returncode == 0, done.stderr
    assert [path for path, _ in handler.asked] == [
        "/v2/models/m/ready", "/v2/models/m/ready", "/v2/models/m/generate", "/openai/v1/completions", "/metrics",
    ]  # fmt: skip
    assert {key for _, key in handler.asked} == {"0123456789"}


def test_helm_test_fails_with_what_the_server_said(server: tuple[str, type[_Server]]) -> None:
    url, handler = server
    handler.openai = (500, {"error": "the engine has failed"})
    done = check(url)
    assert done.returncode == 1
    assert "500" in done.stderr
    assert "the engine has failed" in done.stderr
