"""OpenTelemetry metrics and spans of a replica, and where they go.

Would catch: values of another replica, spans outside of their sync, a change of the global random
state, exports by forked workers, a collector that delays training, a bad setting found too late.
"""

from __future__ import annotations

import os
import random
import re
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_edit.comm.placement import Placement
from megatron_edit.constants import OUTLYING_NORM, SYNC_TIMES
from megatron_edit.errors import UsageError
from megatron_edit.observe import telemetry as telemetry_module
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.listeners import Listener
from megatron_edit.observe.mlflow_run import check_mlflow
from megatron_edit.observe.records import Ending, Evaluation, Iteration
from megatron_edit.observe.telemetry import (
    INSTRUMENTS,
    PHASES,
    SYNC,
    VERDICTS,
    Telemetry,
    check_telemetry,
    trace_id_of,
    write_spans,
)
from tests.harness.otlp_receiver import collector
from tests.harness.ports import free_ports
from tests.pure.test_event_log import report

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "monitoring.md"
STEP = Iteration(41, 41, 3.25, 1.0, 1e-3, 8, 320, 1024, 0.1)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the variables of OpenTelemetry that this machine may have."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)


class Memory:
    """Providers of the SDK that keep what they get."""

    def __init__(self) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.reader, self.exporter = InMemoryMetricReader(), InMemorySpanExporter()
        from megatron_edit.observe.otel_sdk import SpanIds

        self.ids = SpanIds()
        self.meter = MeterProvider([self.reader], shutdown_on_exit=False)
        self.tracer = TracerProvider(id_generator=self.ids, shutdown_on_exit=False)
        self.tracer.add_span_processor(SimpleSpanProcessor(self.exporter))

    def points(self) -> dict[tuple[str, str], Any]:
        """Return the data points by metric and the attribute other than `replica`."""
        data, found = self.reader.get_metrics_data(), {}
        for resource in data.resource_metrics:
            for metric in resource.scope_metrics[0].metrics:
                for point in metric.data.data_points:
                    others = [v for k, v in point.attributes.items() if k != "replica"]
                    assert point.attributes["replica"] == "1" and len(others) < 2
                    found[metric.name, "".join(others)] = point
        return found

    def values(self) -> dict[tuple[str, str], float]:
        """Return the values of counters and gauges."""
        return {key: p.value for key, p in self.points().items() if hasattr(p, "value")}


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Return providers, the global ones of the test; skip where the extra is not installed."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import metrics, trace

    made = Memory()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: made.tracer)
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: made.meter)
    return made


def joined(replica: str = "1") -> Telemetry:
    """Return telemetry of a replica that has begun with the providers of the process."""
    made = Telemetry(replica, otlp=False, port=None)
    assert made.begin({}, 100, 2)
    return made


def feed(listener: Any) -> None:
    """Pass one record of each kind on; a sync of the replicas 0 and 1."""
    listener.on_iteration(STEP)
    listener.on_sync(sync(digest=None))
    listener.on_evaluation(Evaluation(41, 328, "validation", 2.5))
    listener.on_evaluation(Evaluation(41, 328, "test", 9.0))
    listener.on_end(Ending("failed", "drift", 3, 41, 328))


def sync(**changes: Any) -> Any:
    """Return a report in which the detector rejects replica 1 in the second unit."""
    made = report(**{"clip": torch.tensor([1.0, 0.5, torch.nan]), **changes})
    made.decision.verdict.anomalous[1, 1] = True
    made.decision.rollback[2] = True
    return made


def test_metrics_are_those_of_the_replica(memory: Memory) -> None:
    """All instruments have the values of this replica, also where the other's differ."""
    feed(joined())
    found, points = memory.values(), memory.points()
    assert memory.values() == found, "a value is exported only once"
    assert found["edit.iterations.done", ""] == 41 and found["edit.iterations.target", ""] == 100
    assert found["edit.tokens", ""] == 1024 and found["edit.loss", ""] == 3.25
    assert found["edit.validation.loss", ""] == 2.5, "a test set is no validation set"
    assert found["edit.round", ""] == 7
    assert found["edit.replicas.active", ""] == found["edit.replicas.expected", ""] == 2
    assert found["edit.sync.sent", ""] == 2_000_000
    assert {v: found["edit.sync.updates", v] for v in VERDICTS} == {
        "accepted": 2, OUTLYING_NORM: 1, "loss": 0, "non-finite": 0, "no-step": 0
    }  # fmt: skip
    assert found["edit.sync.rollbacks", ""] == 1
    assert found["edit.weight", ""] == pytest.approx((0.5 + 0.0 + 0.75) / 3)
    assert found["edit.clip", ""] == 0.75, "values of other stages are left out"
    assert found["edit.z_score", ""] == pytest.approx(5 / 3)
    assert found["edit.run.ends", "3"] == 1
    for phase in SYNC_TIMES:
        point = points["edit.sync.duration", phase]
        assert (point.count, point.sum) == (1, report().seconds[phase])
    assert {name for name, _ in points} == {each.name for each in INSTRUMENTS}


def test_unknown_values_are_left_out(memory: Memory) -> None:
    """Would catch NaN in a gauge, and an error where no detector is armed."""
    telemetry = joined()
    made = sync(clip=torch.full((3,), torch.nan))
    made.decision.verdict.scores.fill_(torch.nan)
    telemetry.on_sync(made)
    telemetry.on_iteration(Iteration(1, 1, float("nan"), None, None, 8, 8, 64, 0.1))
    found = {name for name, _ in memory.values()}
    assert not {"edit.clip", "edit.z_score", "edit.loss"} & found and "edit.tokens" in found


@pytest.mark.parametrize("total", [1.5, 1.0])
def test_spans_divide_the_sync(memory: Memory, total: float) -> None:
    """The phases follow each other, and fill the whole sync, also if rounding makes it shorter."""
    seconds = report().seconds | {"total": total}
    write_spans(memory.tracer.get_tracer("t"), sync(seconds=seconds), "1", int(2e18))
    *phases, whole = memory.exporter.get_finished_spans()
    assert whole.name == SYNC and [span.name for span in phases] == list(PHASES)
    assert (whole.start_time, whole.end_time) == (int(2e18) - int(total * 1e9), int(2e18))
    edges = [whole.start_time, *(span.end_time for span in phases)]
    assert [span.start_time for span in phases] == edges[:-1] and edges[-1] == whole.end_time
    assert edges == sorted(edges)
    assert (edges[1] - edges[0]) / 1e9 == pytest.approx(seconds["wait"])
    assert all(span.parent.span_id == whole.context.span_id for span in phases)
    assert whole.attributes["edit.round"] == 7 and whole.attributes["edit.sync.rejected"] == 1


def test_replicas_share_one_trace_per_sync(memory: Memory) -> None:
    """The id depends on gathered values only: not on times, which differ between replicas."""
    other = sync(seconds=dict.fromkeys(SYNC_TIMES, 9.0))
    assert trace_id_of(sync()) == trace_id_of(other)
    assert trace_id_of(sync()) != trace_id_of(sync(round=8))
    memory.ids.next_trace = trace_id_of(sync())
    write_spans(memory.tracer.get_tracer("t"), sync(), "1")
    traces = {span.context.trace_id for span in memory.exporter.get_finished_spans()}
    assert traces == {trace_id_of(other)}


def test_span_ids_leave_global_random_state(memory: Memory) -> None:
    """Megatron seeds it alike on all replicas, whose spans would have the same ids."""
    before = random.getstate()
    write_spans(memory.tracer.get_tracer("t"), sync(), "1")
    assert random.getstate() == before


def test_telemetry_joins_global_providers(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with Megatron's --otel-enabled; --edit-telemetry then adds no second export."""
    telemetry = Telemetry("1", otlp=True, port=None)
    with (
        collector() as other,
        memory.tracer.get_tracer("host").start_as_current_span("megatron.train"),
    ):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", other.url)
        assert telemetry.begin({}, 100, 2)
        feed(telemetry)
        telemetry.close()
    assert not other.spans and not other.metrics
    assert memory.values()["edit.round", ""] == 7
    spans = {span.name: span for span in memory.exporter.get_finished_spans()}
    assert spans[SYNC].parent.span_id == spans["megatron.train"].context.span_id


@pytest.mark.parametrize("is_installed", [True, False])
def test_nothing_is_made_without_flags(monkeypatch: pytest.MonkeyPatch, is_installed: bool) -> None:
    """The providers of OpenTelemetry's API, which do nothing, do not count."""
    if is_installed:
        pytest.importorskip("opentelemetry.sdk")
        from opentelemetry import metrics, trace

        monkeypatch.setattr(trace, "get_tracer_provider", trace.NoOpTracerProvider)
        monkeypatch.setattr(metrics, "get_meter_provider", metrics.NoOpMeterProvider)
    telemetry = Telemetry("0", otlp=False, port=None)
    telemetry.listen()
    assert not telemetry.begin({}, 100, 2)
    telemetry.close()


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what names the collector, to which exports are frequent."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "100")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    return lambda url: monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)


def test_unreachable_collector_delays_nothing(
    endpoint: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """More spans than the queue holds; at the end a few seconds, and one warning in all."""
    endpoint(f"http://127.0.0.1:{free_ports(1)[0]}")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "20")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "20")
    monkeypatch.setattr(telemetry_module, "EXPORT_SECONDS", 1.0)
    telemetry = Telemetry("1", otlp=True, port=None)
    assert telemetry.begin({}, 100, 2)
    began, before = time.monotonic(), random.getstate()
    for _ in range(100):
        telemetry.on_sync(sync())
    assert time.monotonic() - began < 5
    time.sleep(1.0)
    telemetry.close()
    assert time.monotonic() - began < 10
    assert random.getstate() == before, "a retry has drawn from Python's random"
    text = capfd.readouterr().err
    assert text.count("[edit] opentelemetry.") == 1 and "Traceback" not in text


def test_collector_that_hangs_ends_with_a_warning(
    endpoint: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It accepts connections and never answers."""
    monkeypatch.setattr(telemetry_module, "EXPORT_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint(f"http://127.0.0.1:{server.getsockname()[1]}")
        telemetry = Telemetry("1", otlp=True, port=None)
        assert telemetry.begin({}, 100, 2)
        feed(telemetry)
        began = time.monotonic()
        telemetry.close()
        assert time.monotonic() - began < 5
    text = capfd.readouterr().err
    assert "[edit] the last telemetry could not be sent in 1 s (no answer), and is lost" in text


def test_forked_processes_export_nothing(endpoint: Callable[[str], None]) -> None:
    """Workers of a data loader inherit the exporters, and would send copies of old values."""
    before = random.getstate()
    with collector() as found:
        endpoint(found.url)
        telemetry = Telemetry("1", otlp=True, port=None)
        assert telemetry.begin({"edit.replica": "1"}, 100, 2)
        if (child := os.fork()) == 0:
            telemetry.on_sync(sync())
            time.sleep(1.0)  # several exports
            os._exit(0)
        os.waitpid(child, 0)
        assert not found.spans
        telemetry.on_sync(sync())
        telemetry.close()
    assert [span.name for span in found.spans] == [*PHASES, SYNC]
    assert random.getstate() == before, "an export has drawn from Python's random"


def test_resource_attributes_of_the_environment_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the name of the service."""
    pytest.importorskip("opentelemetry.sdk")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "edit.strategy=mine,team=a")
    assert resource({"edit.strategy": "edit", "edit.replica": "1"}) >= {
        ("edit.strategy", "mine"), ("edit.replica", "1"), ("team", "a"),
        ("service.name", "megatron-lm"),
    }  # fmt: skip
    monkeypatch.setenv("OTEL_SERVICE_NAME", "other")
    assert ("service.name", "other") in resource({})


def resource(attributes: dict[str, str]) -> set[tuple[str, Any]]:
    """Return the attributes of the process as they are exported."""
    from megatron_edit.observe.otel_sdk import TRACES, make_providers

    tracer, _ = make_providers([TRACES], attributes, has_port=False)
    assert tracer is not None
    tracer.shutdown()
    return set(tracer.resource.attributes.items())


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, "OTEL_METRICS_EXPORTER=prometheus"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL=http/json"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "host:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT=host:4318"),
        ({"OTEL_BSP_MAX_QUEUE_SIZE": "-1"}, "max_queue_size must be"),
    ],
)
def test_bad_variables_are_refused(
    environment: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before training, with the variable."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as caught:
        check_telemetry(otlp=True, port=None, num_replicas=2)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("check", "package"),
    [
        (lambda: check_telemetry(otlp=True, port=None, num_replicas=2), "megatron_edit[metrics]"),
        (lambda: check_telemetry(otlp=False, port=9464, num_replicas=2), "megatron_edit[metrics]"),
        (lambda: check_mlflow("e"), "megatron_edit[mlflow]"),
    ],
    ids=["otlp", "prometheus", "mlflow"],
)
def test_missing_package_is_named_with_its_extra(
    check: Callable[[], None], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`find_spec` finds nothing, as in an environment without the extras."""
    monkeypatch.setattr("megatron_edit.observe.listeners.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="not installed") as caught:
        check()
    assert f"pip install '{package}'" in str(caught.value)


def test_ports_of_all_replicas_must_exist() -> None:
    """The last replica's port is checked, too."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    check_telemetry(otlp=False, port=65534, num_replicas=2)
    with pytest.raises(UsageError, match="largest is 65535"):
        check_telemetry(otlp=False, port=65534, num_replicas=3)


def test_used_port_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is free again after a close."""
    pytest.importorskip("prometheus_client")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "127.0.0.1")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"port {port}.*cannot be listened at"):
            Telemetry("0", otlp=False, port=port).listen()
    for _ in range(2):
        telemetry = Telemetry("0", otlp=False, port=port)
        telemetry.listen()
        telemetry.close()
        telemetry.close()


def test_port_has_metrics_beside_global_providers(
    memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prometheus and the providers of the process get the same values; after drift the port stays
    open for some time."""
    monkeypatch.setattr(telemetry_module, "LINGER_SECONDS", 1.0)
    pytest.importorskip("opentelemetry.exporter.prometheus")
    (port,) = free_ports(1)
    telemetry = Telemetry("1", otlp=False, port=port)
    telemetry.listen()
    assert telemetry.begin({}, 100, 2)
    feed(telemetry)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    assert re.search(r"^edit_round\{.*replica=\"1\"\} 7.0$", text, re.M)
    assert memory.values()["edit.round", ""] == 7
    began = time.monotonic()
    telemetry.close()
    assert 1 <= time.monotonic() - began < 10, "after drift it waits for a scrape"


def test_event_log_passes_records_on() -> None:
    """To all listeners, on a rank without event files, too; they are closed once."""
    calls: list[str] = []

    class Recorder(Listener):
        """Records the names of the calls."""

        def __getattribute__(self, name: str) -> Any:
            if name.startswith(("on_", "close")):
                calls.append(name)
            return super().__getattribute__(name)

    log = EventLog(None, Placement(2, 1, 1, 0, is_single_launch=True))
    log.add_listener(Recorder())
    log.add_listener(Recorder())
    feed(log)
    log.on_losses(1, [3.0])
    log.close()
    log.close()
    names = ["on_iteration", "on_sync", *["on_evaluation"] * 2, "on_end", "on_losses", "close"]
    assert calls == [name for name in names for _ in range(2)]


def test_documented_metrics_match_code() -> None:
    """Would catch a metric without documentation, and a documented one that was removed."""
    rows = [
        f"| `{each.name}` | {each.kind} | {each.unit.strip('{}') or ' '} | "
        f"{f'`{each.attribute}`' if each.attribute else ' '} | {each.meaning} |"
        for each in INSTRUMENTS
    ]
    rows = [" ".join(row.split()) for row in rows]
    text = DOCUMENT.read_text(encoding="utf-8").partition("## Metrics")[2]
    found = [line for line in text.splitlines() if line.startswith("| `edit.")]
    assert found == rows, "\n".join(rows)
