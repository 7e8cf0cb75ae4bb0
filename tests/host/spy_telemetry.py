"""A hook that sets OpenTelemetry's global providers, as Megatron does with `--otel-enabled`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from tests.host.spy import out_dir


def set_global_providers() -> None:
    """Let every rank write a line to `telemetry-<global rank>.jsonl` for each of its spans: name,
    and names of the metrics that there are."""
    from opentelemetry import metrics, trace
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import (
        SimpleSpanProcessor,
        SpanExporter,
        SpanExportResult,
    )

    file, reader = out_dir() / f"telemetry-{os.environ['RANK']}.jsonl", InMemoryMetricReader()

    class Exporter(SpanExporter):  # type: ignore[misc]
        """Writes the lines."""

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            """Write a line for each span."""
            data = reader.get_metrics_data()
            scopes = [] if data is None else data.resource_metrics[0].scope_metrics
            names = sorted(metric.name for scope in scopes for metric in scope.metrics)
            with file.open("a") as lines:
                lines.writelines(json.dumps([span.name, names]) + "\n" for span in spans)
            return SpanExportResult.SUCCESS

    metrics.set_meter_provider(MeterProvider([reader]))
    tracer = TracerProvider()
    tracer.add_span_processor(SimpleSpanProcessor(Exporter()))
    trace.set_tracer_provider(tracer)
