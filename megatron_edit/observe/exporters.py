"""OpenTelemetry's SDK: where metrics and spans of this process go.

OpenTelemetry's own environment variables (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`, ...)
decide everything that the two flags do not. Exports run in threads with bounded queues, and only in
this process: forked workers would export copies of its values.
"""

from __future__ import annotations

import logging
import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.observe.console import warn

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.trace import TracerProvider

SERVICE = "megatron-lm"  # Megatron's own default for OTEL_SERVICE_NAME
EXTRA, GRPC_PACKAGE = "megatron_edit[metrics]", "opentelemetry-exporter-otlp-proto-grpc"
OTLP, NO_EXPORTER = _EXPORTERS = ("otlp", "none")
HTTP, GRPC = _PROTOCOLS = ("http/protobuf", "grpc")
TRACES, METRICS = _SIGNALS = ("TRACES", "METRICS")
_PACKAGES = {HTTP: "opentelemetry.exporter.otlp.proto.http",
             GRPC: "opentelemetry.exporter.otlp.proto.grpc"}  # fmt: skip
_PROMETHEUS = "opentelemetry.exporter.prometheus"
PORT_SECONDS = 10.0  # how long to wait for the port, which a run that is just ending may still use
EXPORT_SECONDS = 5.0  # how long the last export may take
_LARGEST_PORT = 65535


@dataclass(frozen=True)
class TelemetryTargets:
    """Where telemetry of this process goes, beside the providers of the host.

    Attributes:
        otlp: whether to the OTLP endpoint that the environment names.
        port: at which Prometheus scrapes replica 0; None for no Prometheus.
        replica: of this process; its port is `port` + `replica`.
    """

    otlp: bool
    port: int | None
    replica: int

    @property
    def own_port(self) -> int | None:
        """Port of this replica; None for no Prometheus."""
        return None if self.port is None else self.port + self.replica

    def check(self, num_replicas: int) -> None:
        """Check packages, environment variables, and the range of the ports.

        Args:
            num_replicas: of this run, each of which needs a port.

        Raises:
            UsageError: telemetry cannot be had in this way.
        """
        if self.port is not None:
            _require(f"{flag('metrics_port')} {self.port}", _PROMETHEUS, EXTRA)
            if self.port + num_replicas - 1 > _LARGEST_PORT:
                raise UsageError(
                    f"{flag('metrics_port')} {self.port}",
                    f"{num_replicas} replicas use one port each from this one on, and the largest "
                    f"is {_LARGEST_PORT}",
                    "give a smaller port",
                )
        if self.otlp:
            _require(flag("telemetry"), "opentelemetry.sdk", EXTRA)
        for signal in self.otlp_signals:
            protocol = _protocol_of(signal)
            package = EXTRA if protocol == HTTP else GRPC_PACKAGE
            _require(f"{flag('telemetry')} ({protocol})", _PACKAGES[protocol], package)
            _check_endpoint(signal, protocol)
        if signals := self.otlp_signals:
            try:
                Providers.make(signals, {}, has_port=False).close()
            except Exception as error:  # of any type: what the SDK makes of its variables
                text = f"{type(error).__name__}: {error}".splitlines()[0]
                raise UsageError(
                    f"{flag('telemetry')} (OTEL_...)",
                    f"OpenTelemetry refuses a variable of the environment ({text})",
                    "correct or unset it",
                ) from error

    @property
    def otlp_signals(self) -> list[str]:
        """Signals to send over OTLP.

        Raises:
            UsageError: a variable of OpenTelemetry names another exporter.
        """
        return [signal for signal in _SIGNALS if self.otlp and _exporter_of(signal) == OTLP]


@dataclass
class Endpoint:
    """An HTTP server of this process that Prometheus scrapes.

    Attributes:
        scraped: set when a scrape has been answered.
    """

    scraped: threading.Event
    _stop: Callable[[], None] | None = None
    _last_begun: float = -math.inf  # when the last answered scrape began, monotonic

    @classmethod
    def listen(cls, port: int) -> Endpoint:
        """Open the port, at the address OTEL_EXPORTER_PROMETHEUS_HOST.

        Raises:
            UsageError: another process uses it, or the address is not one of this machine.
        """
        from prometheus_client import MetricsHandler

        made = cls(threading.Event())

        class Handler(MetricsHandler):  # type: ignore[misc]
            """Answers with all metrics, and notes the scrape."""

            def do_GET(self) -> None:
                """Answer a request."""
                began = time.monotonic()
                super().do_GET()
                made._last_begun = began
                made.scraped.set()

        server = _open(os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", ""), port, Handler)
        thread = threading.Thread(target=server.serve_forever, name="edit-metrics", daemon=True)
        thread.start()

        def stop() -> None:
            server.shutdown()
            server.server_close()
            thread.join()

        made._stop = stop
        return made

    def await_scrape(self, seconds: float) -> None:
        """Wait until a scrape that begins from now on has been answered.

        Args:
            seconds: at most.
        """
        now = time.monotonic()
        end = now + seconds
        while self._last_begun < now and self.scraped.wait(max(0.0, end - time.monotonic())):
            self.scraped.clear()

    def close(self) -> None:
        """Close the port. Idempotent."""
        if self._stop is not None:
            self._stop()
            self._stop = None


@dataclass
class Providers:
    """The providers that this process has made for itself; not OpenTelemetry's global ones.

    Attributes:
        tracer: None if there are no spans.
        meter: None if there are no metrics.
        ids: next ids of the spans of `tracer`.
    """

    tracer: TracerProvider | None
    meter: MeterProvider | None
    ids: SpanIds
    _restore_log: Callable[[], None]

    @classmethod
    def make(
        cls, signals: Collection[str], attributes: Mapping[str, str], *, has_port: bool
    ) -> Providers:
        """Make the providers for some targets.

        Args:
            signals: to send over OTLP.
            attributes: of the process; those in OTEL_RESOURCE_ATTRIBUTES take precedence.
            has_port: whether Prometheus scrapes this process.
        """
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        restore, ids, resource = _show_one_warning(), SpanIds(), _resource(attributes)
        tracer = meter = None
        readers: list[MetricReader] = []
        if has_port:
            from opentelemetry.exporter.prometheus import PrometheusMetricReader

            readers.append(PrometheusMetricReader())
        if METRICS in signals:
            readers.append(PeriodicExportingMetricReader(_otlp_exporter(METRICS)))
        if readers:
            meter = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        if TRACES in signals:
            tracer = TracerProvider(resource=resource, id_generator=ids, shutdown_on_exit=False)
            tracer.add_span_processor(BatchSpanProcessor(_otlp_exporter(TRACES)))
        return cls(tracer, meter, ids, restore)

    def close(self) -> None:
        """Export what remains, for a few seconds at most."""

        def shut_down() -> None:
            for provider in (self.tracer, self.meter):
                if provider is not None:
                    provider.shutdown()

        # Not in this thread: the SDK retries a server that does not answer for half a minute.
        thread = threading.Thread(target=shut_down, daemon=True)
        thread.start()
        thread.join(EXPORT_SECONDS)
        if thread.is_alive():
            warn(f"the last telemetry could not be sent in {EXPORT_SECONDS:g} s, and is lost")
        self._restore_log()


class SpanIds:
    """Generates ids of spans, as the SDK's `IdGenerator`.

    The SDK's own one draws from the global `random`, which Megatron seeds alike on all replicas,
    saves in checkpoints, and whose state telemetry must not change.

    Attributes:
        next_trace: id of the next traces; None for random ones.
    """

    def __init__(self) -> None:
        self._random = random.Random()  # seeded by the operating system
        self.next_trace: int | None = None

    def generate_span_id(self) -> int:
        """Return a random id of a span."""
        return self._random.getrandbits(64) or 1

    def generate_trace_id(self) -> int:
        """Return the id of a trace."""
        return self.next_trace or self._random.getrandbits(128) or 1

    def is_trace_id_random(self) -> bool:
        """Whether ids of traces are uniformly distributed, as samplers need it."""
        return True


def host_providers() -> tuple[TracerProvider | None, MeterProvider | None]:
    """Return OpenTelemetry's global providers, if the host has set any that export.

    Megatron does so with `--otel-enabled`, and `opentelemetry-instrument` for any script.
    """
    if "opentelemetry" not in sys.modules:  # then nobody can have set them
        return None, None
    from opentelemetry import metrics, trace

    tracer, meter = trace.get_tracer_provider(), metrics.get_meter_provider()
    return tracer if _has_sdk(tracer) else None, meter if _has_sdk(meter) else None


def is_disabled() -> bool:
    """Whether the user has disabled OpenTelemetry by its own variable."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def _open(host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> ThreadingHTTPServer:
    """Open a port, which a process that is just ending may still have."""

    class Server(ThreadingHTTPServer):
        """With IPv6 where the address is one."""

        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: object, client_address: object) -> None:
            """Print no traceback for a client that has gone."""

    end = time.monotonic() + PORT_SECONDS
    while True:
        try:
            return Server((host, port), handler)
        except OSError as error:
            if time.monotonic() > end:
                raise UsageError(
                    f"{flag('metrics_port')} ({host or 'any address'}, port {port})",
                    f"cannot be listened at ({error.strerror})",
                    "give another port: replica r uses the given one + r",
                    is_local=True,
                ) from error
            time.sleep(0.2)


def _resource(attributes: Mapping[str, str]) -> Resource:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource

    given = OTELResourceDetector().detect().attributes
    mine = {"service.name": SERVICE, **attributes}
    return Resource.create({name: mine[name] for name in mine if name not in given})


def _has_sdk(provider: object) -> bool:
    """Whether a provider is not one of those of OpenTelemetry's API, which do nothing."""
    return not type(provider).__module__.startswith(
        ("opentelemetry.trace", "opentelemetry.metrics")
    )


def _require(value: str, module: str, package: str) -> None:
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        is_there = False
    if not is_there:
        raise UsageError(
            value,
            f"needs the package {module.replace('.', '-')}, which is not installed",
            f"pip install '{package}', or drop the flag",
        )


def _exporter_of(signal: str) -> str:
    name = f"OTEL_{signal}_EXPORTER"
    return _choice(name, os.environ.get(name), _EXPORTERS)


def _protocol_of(signal: str) -> str:
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if os.environ.get(name, "").strip():
            return _choice(name, os.environ[name], _PROTOCOLS)
    return HTTP


def _check_endpoint(signal: str, protocol: str) -> None:
    """Refuse an endpoint to which nothing could be sent; the SDK would accept it.

    Raises:
        UsageError: it is one.
    """
    for name in (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        value = os.environ.get(name, "").strip()
        if value and protocol == HTTP and not value.startswith(("http://", "https://")):
            raise UsageError(
                f"{name}={value}",
                "must begin with http:// or https://",
                "give the whole URL of the collector, such as http://HOST:4318",
            )


def _choice(name: str, text: str | None, choices: tuple[str, ...]) -> str:
    """Return the value of a variable; the first choice where it is not set.

    Raises:
        UsageError: it is none of the choices.
    """
    value = (text or "").strip() or choices[0]
    if value not in choices:
        raise UsageError(
            f"{name}={value}",
            f"{flag('telemetry')} supports only: {', '.join(choices)}",
            f"unset it, or use one of these ({flag('metrics_port')} is for Prometheus)",
        )
    return value


def _otlp_exporter(signal: str) -> Any:
    """Make the exporter of a signal, which exports nothing in forked processes."""
    from opentelemetry.sdk.metrics.export import MetricExportResult
    from opentelemetry.sdk.trace.export import SpanExportResult

    exporter = _exporter_class(signal, _protocol_of(signal))()
    success = SpanExportResult.SUCCESS if signal == TRACES else MetricExportResult.SUCCESS
    owner, export = os.getpid(), exporter.export

    def export_in_owner(*args: Any, **kwargs: Any) -> Any:
        return export(*args, **kwargs) if os.getpid() == owner else success

    exporter.export = export_in_owner
    return exporter


def _exporter_class(signal: str, protocol: str) -> Any:
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc import metric_exporter, trace_exporter
    else:
        from opentelemetry.exporter.otlp.proto.http import metric_exporter, trace_exporter
    if signal == TRACES:
        return trace_exporter.OTLPSpanExporter
    return metric_exporter.OTLPMetricExporter


class _FirstRecord(logging.Handler):
    """Prints the first warning of OpenTelemetry's log; there may be one per export."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._has_warned = False

    def emit(self, record: logging.LogRecord) -> None:
        """Handle a record of the log."""
        if not self._has_warned:
            self._has_warned = True
            text = record.getMessage().splitlines()[0]
            warn(f"OpenTelemetry: {text}; training goes on, later warnings of it are not shown")


def _show_one_warning() -> Callable[[], None]:
    """Replace the lines of OpenTelemetry's log by one warning; return what undoes it."""
    logger, handler = logging.getLogger("opentelemetry"), _FirstRecord()
    logger.addHandler(handler)
    before, logger.propagate = logger.propagate, False

    def undo() -> None:
        logger.removeHandler(handler)
        logger.propagate = before

    return undo
