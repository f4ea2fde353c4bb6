"""Loopback servers that the tests of model sources download from."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class FileServer:
    """Serves `files` (path -> body) over HTTP, with the faults that a test sets.

    Attributes:
        cut_after: end each body after so many bytes, as long as `cuts` > 0 (each cut counts it down).
        ranges: whether Range headers are honoured.
        lengths: whether Content-Length is sent (HEAD is refused otherwise, as such servers do).
        requests: (method, path, Range header or None), in order.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.cut_after = 0
        self.cuts = 0
        self.ranges = True
        self.lengths = True
        self.status: dict[str, int] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.url = ""

    def bodies_requested(self) -> list[str | None]:
        """The Range header of each GET, in order."""
        return [header for method, _, header in self.requests if method == "GET"]

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(handler.path).path)
        header = handler.headers.get("Range")
        self.requests.append((handler.command, path, header))
        if path in self.status or path not in self.files:
            handler.send_error(self.status.get(path, 404))
            return
        content = self.files[path]
        start, end = 0, len(content)
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "")
        if match and self.ranges:
            start = int(match[1])
            end = min(end, int(match[2]) + 1) if match[2] else end
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        else:
            handler.send_response(200)
        if self.lengths:
            handler.send_header("Content-Length", str(end - start))
        handler.send_header("Accept-Ranges", "bytes" if self.ranges else "none")
        handler.send_header("ETag", f'"{hashlib.md5(content, usedforsecurity=False).hexdigest()}"')
        handler.end_headers()
        if not body:
            return
        if self.cuts > 0 and end - start > self.cut_after:
            self.cuts -= 1
            end = start + self.cut_after
            handler.close_connection = True
        handler.wfile.write(memoryview(content)[start:end])


class FakeHub(FileServer):
    """As much of the Hugging Face Hub's API as huggingface_hub needs for one public model repository."""

    commit = "c" * 40

    def __init__(self, repo: str) -> None:
        super().__init__()
        self.repo = repo
        self.down = False
        self.gated = False

    def answer(self, handler: BaseHTTPRequestHandler, *, body: bool) -> None:
        path = unquote(urlsplit(handler.path).path)
        if self.down:
            self.requests.append((handler.command, path, None))
            handler.send_error(503)
            return
        api = f"/api/models/{self.repo}"
        names = {name.rpartition(f"/resolve/{self.commit}/")[2]: content for name, content in self.files.items()}
        if self.gated:
            self._send(handler, 403, {"error": "restricted"}, {"X-Error-Code": "GatedRepo"})
        elif path in {f"{api}/revision/main", f"{api}/revision/{self.commit}"}:
            siblings = [{"rfilename": name, "size": len(content)} for name, content in names.items()]
            self._send(handler, 200, {"id": self.repo, "sha": self.commit, "siblings": siblings})
        elif path.startswith(f"{api}/revision/"):
            self._send(handler, 404, {"error": "no"}, {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"{api}/tree/{self.commit}"):
            tree = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha256(content).hexdigest()[:40]}
                for name, content in names.items()
            ]
            self._send(handler, 200, tree)
        elif path.startswith("/api/"):
            self._send(handler, 404, {"error": "no"}, {"X-Error-Code": "RepoNotFound"})
        else:
            super().answer(handler, body=body)

    def add(self, name: str, content: bytes) -> None:
        self.files[f"/{self.repo}/resolve/{self.commit}/{name}"] = content

    def downloads(self) -> list[str]:
        """The files that were asked for, each once."""
        return sorted(
            {path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}
        )

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, answer: object, headers: dict[str, str] | None = None
    ) -> None:
        self.requests.append((handler.command, urlsplit(handler.path).path, None))
        content = json.dumps(answer).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(content)


@contextmanager
def serving(files: FileServer) -> Iterator[None]:
    """Run the server on a free port of 127.0.0.1; its address goes to `files.url`."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if not files.lengths:
                self.close_connection = True
            files.answer(self, body=True)

        def do_HEAD(self) -> None:
            if files.lengths:
                files.answer(self, body=False)
            else:
                self.send_error(405)

        def log_message(self, *args: object) -> None:
            pass

        def end_headers(self) -> None:
            # The commit that a file belongs to, without which huggingface_hub takes no file.
            if isinstance(files, FakeHub):
                self.send_header("X-Repo-Commit", files.commit)
            super().end_headers()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    files.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
