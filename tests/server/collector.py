"""A collector of OpenTelemetry traces in this process, over HTTP and gRPC, that parses what it is sent."""

from __future__ import annotations

import gzip
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as stubs


def value(of: Any) -> Any:
    kind = of.WhichOneof("value")
    return [value(item) for item in of.array_value.values] if kind == "array_value" else getattr(of, kind)


class Span:
    """A span as it arrived, with plain attributes and hexadecimal ids."""

    def __init__(self, raw: Any, resource: dict[str, Any]) -> None:
        self.name, self.kind, self.resource = raw.name, raw.kind, resource
        self.trace_id, self.span_id, self.parent_id = raw.trace_id.hex(), raw.span_id.hex(), raw.parent_span_id.hex()
        self.start, self.end = raw.start_time_unix_nano, raw.end_time_unix_nano
        self.attributes = {item.key: value(item.value) for item in raw.attributes}
        self.events = [
            (event.name, {item.key: value(item.value) for item in event.attributes}, event.time_unix_nano)
            for event in raw.events
        ]
        self.failed = raw.status.code == 2
        self.state = raw.trace_state


class Collector:
    """``http``: where it listens for ``http/protobuf``; ``grpc``: for ``grpc``. Close it."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.requests = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                known = self.path == "/v1/traces"
                if known:
                    collector.take(service.ExportTraceServiceRequest.FromString(body))
                answer = service.ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if known else 404)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._web.serve_forever, args=(0.05,), daemon=True).start()
        self.http = f"http://127.0.0.1:{self._web.server_address[1]}"

        class Service(stubs.TraceServiceServicer):
            def Export(self, request: Any, context: Any) -> Any:
                collector.take(request)
                return service.ExportTraceServiceResponse()

        self._rpc = grpc.server(futures.ThreadPoolExecutor(2))
        stubs.add_TraceServiceServicer_to_server(Service(), self._rpc)
        self.grpc = f"http://127.0.0.1:{self._rpc.add_insecure_port('127.0.0.1:0')}"
        self._rpc.start()

    def take(self, request: service.ExportTraceServiceRequest) -> None:
        self.requests += 1
        for batch in request.resource_spans:
            resource = {item.key: value(item.value) for item in batch.resource.attributes}
            for scope in batch.scope_spans:
                self.spans += [Span(span, resource) for span in scope.spans]

    def close(self) -> None:
        self._web.shutdown()
        self._web.server_close()
        self._rpc.stop(0)

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]

    def below(self, parent: Span) -> list[Span]:
        children = [span for span in self.spans if span.parent_id == parent.span_id]
        return sorted(children, key=lambda span: span.start)
