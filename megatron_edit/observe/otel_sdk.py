"""Providers of OpenTelemetry's SDK for a process that has none, as the variables OTEL_... say.

Needs the packages of the extra `metrics`. Forked workers export nothing: they would send copies.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator

TRACES, METRICS = SIGNALS = ("TRACES", "METRICS")
_SERVICE = "megatron-lm"  # Megatron's own default for OTEL_SERVICE_NAME


class SpanIds(IdGenerator):  # type: ignore[misc]
    """Generates ids of spans; the SDK's own generator changes the state of `random`.

    Attributes:
        next_trace: id of the next traces; None for random ones.
    """

    def __init__(self) -> None:
        self.next_trace: int | None = None

    def generate_span_id(self) -> int:
        """Return a random id of a span."""
        return int.from_bytes(os.urandom(8)) or 1

    def generate_trace_id(self) -> int:
        """Return the id of a trace."""
        return self.next_trace or int.from_bytes(os.urandom(16)) or 1


def make_providers(
    signals: Collection[str], attributes: Mapping[str, str], *, has_port: bool
) -> tuple[TracerProvider | None, MeterProvider | None]:
    """Make the providers of spans and metrics; None for one that would export nothing.

    Args:
        signals: to send over OTLP, except where OTEL_<signal>_EXPORTER is `none`.
        attributes: of the process; those of the environment take precedence.
        has_port: whether Prometheus scrapes this process.

    Raises:
        Exception: of any type; a variable has an unsupported value, or a package is missing.
    """
    resource = Resource.create({"service.name": _SERVICE, **attributes})
    resource = resource.merge(OTELResourceDetector().detect())
    tracer, readers = None, list[MetricReader]()
    if has_port:
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        readers.append(PrometheusMetricReader())
    if METRICS in signals and (exporter := _exporter(METRICS, "metric", "OTLPMetricExporter")):
        readers.append(PeriodicExportingMetricReader(exporter))
    if TRACES in signals and (exporter := _exporter(TRACES, "trace", "OTLPSpanExporter")):
        tracer = TracerProvider(resource=resource, id_generator=SpanIds(), shutdown_on_exit=False)
        tracer.add_span_processor(BatchSpanProcessor(exporter))
    if not readers:
        return tracer, None
    return tracer, MeterProvider(readers, resource=resource, shutdown_on_exit=False)


def _exporter(signal: str, module: str, name: str) -> Any:
    """Make the OTLP exporter of a signal; None where the user wants none."""
    if _choice(("otlp", "none"), f"OTEL_{signal}_EXPORTER") == "none":
        return None
    names = (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol, _, _ = _choice(("http/protobuf", "grpc"), *names).partition("/")
    for variable in (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        url = os.environ.get(variable, "").strip()
        if url and protocol == "http" and not url.startswith(("http://", "https://")):
            raise ValueError(f"{variable}={url}, which must begin with http:// or https://")
    package = import_module(f"opentelemetry.exporter.otlp.proto.{protocol}.{module}_exporter")
    exporter = getattr(package, name)()
    for each, loaded in list(sys.modules.items()):  # they draw the times of their retries
        if each.startswith("opentelemetry.exporter.") and vars(loaded).get("random") is random:
            loaded.random = random.Random()  # type: ignore[attr-defined]
    process, export = os.getpid(), exporter.export
    exporter.export = lambda *args, **kwargs: (
        export(*args, **kwargs) if os.getpid() == process else None
    )
    return exporter


def _choice(choices: tuple[str, str], *variables: str) -> str:
    """Return the value of the first variable that is set; else the first choice."""
    for name in variables:
        if (value := os.environ.get(name, "").strip()) and value not in choices:
            raise ValueError(f"{name}={value}; supported are {' and '.join(choices)}")
        if value:
            return value
    return choices[0]
