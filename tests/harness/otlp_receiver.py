"""A collector of a test: it receives OTLP over HTTP and keeps spans and metrics."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Span:
    """A span as received: its name, replica (of the process), trace, parent and attributes."""

    name: str
    replica: str
    trace: bytes
    id: bytes
    parent: bytes
    start: int
    end: int
    attributes: dict[str, Any]


@dataclass
class Collector:
    """What has been received.

    Attributes:
        url: for OTEL_EXPORTER_OTLP_ENDPOINT.
        spans: in the order of their arrival.
        metrics: names by replica.
        services: names of the services.
    """

    url: str
    spans: list[Span] = field(default_factory=list)
    metrics: dict[str, set[str]] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)

    def receive(self, path: str, body: bytes) -> None:
        """Keep the content of a request."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
            ExportMetricsServiceRequest,
        )
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                replica = self._replica(resource.resource)
                for scope in resource.scope_spans:
                    self.spans.extend(
                        Span(s.name, replica, s.trace_id, s.span_id, s.parent_span_id,
                             s.start_time_unix_nano, s.end_time_unix_nano, _values(s.attributes))
                        for s in scope.spans
                    )  # fmt: skip
        elif path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                names = self.metrics.setdefault(self._replica(resource.resource), set())
                names.update(m.name for scope in resource.scope_metrics for m in scope.metrics)

    def _replica(self, resource: Any) -> str:
        values = _values(resource.attributes)
        self.services.add(values["service.name"])
        return str(values["edit.replica"])


def _values(attributes: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """Run a collector until the context ends."""

    class Handler(BaseHTTPRequestHandler):
        """Passes requests to the collector."""

        def do_POST(self) -> None:
            """Receive a request."""
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            made.receive(self.path, body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
