"""An OTLP receiver in the test's own process: HTTP, and gRPC where grpcio is installed.

It decodes what arrives with the protocol's own classes and keeps it, and can be told to be slow
or to answer with an error.
"""

from __future__ import annotations

import contextlib
import gzip
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

PATIENCE = 20.0  # seconds that a test waits for something that should come at once


@dataclass(frozen=True)
class Point:
    """One data point as it arrived."""

    name: str
    kind: str  # sum, gauge or histogram
    unit: str
    help: str
    attributes: dict[str, str]
    resource: dict[str, str]
    start: int
    time: int
    value: float  # of a number; the sum of a histogram
    count: int = 0
    buckets: tuple[int, ...] = ()
    bounds: tuple[float, ...] = ()
    monotonic: bool = False
    cumulative: bool = False


@dataclass
class OtlpReceiver:
    """What arrived, one list of points per export that was accepted.

    Attributes:
        endpoint: base URL.
        status: HTTP status that the next exports are answered with.
        delay: seconds before each answer.
        refused: exports that were answered with an error.
    """

    endpoint: str = ""
    exports: list[list[Point]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    delay: float = 0.0
    refused: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def take(self, request: ExportMetricsServiceRequest, headers: dict[str, str]) -> None:
        with self._changed:
            self.exports.append(list(_points(request)))
            self.headers.append(headers)
            self._changed.notify_all()

    def refuse(self) -> None:
        with self._changed:
            self.refused += 1
            self._changed.notify_all()

    def wait_for(self, condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
        """Waits until something that arrived makes the condition true."""
        with self._changed:
            result = self._changed.wait_for(condition, timeout)
        assert result, f"not within {timeout} s; {len(self.exports)} exports arrived"
        return result

    def find(self, name: str, **attributes: str) -> Point | None:
        """The newest point of that name whose attributes contain the given ones."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}.items()
        for export in reversed(self.exports):
            for point in export:
                if point.name == name and wanted <= point.attributes.items():
                    return point
        return None

    def value(self, name: str, **attributes: str) -> float | None:
        """The newest value of that name; None if there is none."""
        point = self.find(name, **attributes)
        return None if point is None else point.value


@contextlib.contextmanager
def http_receiver() -> Iterator[OtlpReceiver]:
    """Runs one on a free port of 127.0.0.1."""
    receiver = OtlpReceiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            time.sleep(receiver.delay)
            status = receiver.status if self.path == "/v1/metrics" else 404
            if status == 200:
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                request = ExportMetricsServiceRequest.FromString(body)
                receiver.take(request, {key.lower(): value for key, value in self.headers.items()})
            else:
                receiver.refuse()
            answer = ExportMetricsServiceResponse().SerializeToString()
            with contextlib.suppress(ConnectionError):  # the relay may be gone by now
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    receiver.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join(PATIENCE)


@contextlib.contextmanager
def grpc_receiver() -> Iterator[OtlpReceiver]:
    """The same over gRPC. Raises ImportError without grpcio."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as service

    receiver = OtlpReceiver()

    class Servicer(service.MetricsServiceServicer):
        def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
            receiver.take(request, dict(context.invocation_metadata()))
            return ExportMetricsServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    service.add_MetricsServiceServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    receiver.endpoint = f"http://127.0.0.1:{port}"
    try:
        yield receiver
    finally:
        server.stop(None).wait(PATIENCE)


def _points(request: ExportMetricsServiceRequest) -> Iterator[Point]:
    for of_resource in request.resource_metrics:
        resource = _plain(of_resource.resource.attributes)
        for metric in (m for scope in of_resource.scope_metrics for m in scope.metrics):
            kind = metric.WhichOneof("data")
            data = getattr(metric, kind)
            for point in data.data_points:
                yield Point(
                    name=metric.name,
                    kind=kind,
                    unit=metric.unit,
                    help=metric.description,
                    attributes=_plain(point.attributes),
                    resource=resource,
                    start=point.start_time_unix_nano,
                    time=point.time_unix_nano,
                    monotonic=kind == "sum" and data.is_monotonic,
                    cumulative=kind != "gauge" and data.aggregation_temporality == 2,
                    **_figures(kind, point),
                )


def _figures(kind: str, point: Any) -> dict[str, Any]:
    if kind != "histogram":
        return {"value": point.as_double}
    assert not point.HasField("min") and not point.HasField("max")
    return {
        "value": point.sum,
        "count": point.count,
        "buckets": tuple(point.bucket_counts),
        "bounds": tuple(point.explicit_bounds),
    }


def _plain(attributes: Any) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in attributes}
