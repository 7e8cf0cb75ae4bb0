"""OpenTelemetry metrics and spans of a replica: docs/monitoring.md.

They go to the providers of the process, where it has some, as with Megatron's `--otel-enabled`;
else to those that our flags ask for. Values are those of the event files.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from megatron_edit import __version__
from megatron_edit.constants import BAD_LOSS, NO_STEP, NON_FINITE, OUTLYING_NORM, SYNC_TIMES
from megatron_edit.engine import SyncReport
from megatron_edit.errors import DriftError, UsageError
from megatron_edit.flags import flag
from megatron_edit.method.weights import effective_replicas
from megatron_edit.observe.console import show_one_warning
from megatron_edit.observe.listeners import METRICS_EXTRA, Listener, finish_within, require_package
from megatron_edit.observe.metrics import finite_mean, largest_finite, replica_names
from megatron_edit.observe.records import VALIDATION, Ending, Evaluation, Iteration

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from opentelemetry.trace import Tracer

EXPORT_SECONDS = 5.0  # how long the last export may take
# How long a process that has found drift waits for Prometheus to scrape it once more. The interval
# is 15 seconds in configs/telemetry/prometheus.yml; torchrun kills the process after 30.
LINGER_SECONDS = 20.0
_LARGEST_PORT = 65535
_SCOPE = "megatron_edit"
GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
ACCEPTED = "accepted"
VERDICTS = (ACCEPTED, OUTLYING_NORM, BAD_LOSS, NON_FINITE, NO_STEP)
# Upper bounds in seconds: from a sync in one machine to one that waits for a slow replica.
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
SYNC = "edit.sync"
PHASES = ("edit.meeting", "edit.exchange", "edit.outer_step", "edit.landing")


class Instrument(NamedTuple):
    """A metric. Each has the attribute `replica`, its number or (with a hub) its name.

    Attributes:
        name: by the rules of OpenTelemetry.
        kind: gauge, counter or histogram.
        unit: in UCUM; braces mark what is only a remark.
        attribute: further attribute with few values; empty if there is none.
        meaning: for users.
    """

    name: str
    kind: str
    unit: str
    attribute: str
    meaning: str


INSTRUMENTS = tuple(
    Instrument(*row)
    for row in (
        ("edit.iterations.done", GAUGE, "{iteration}", "", "last iteration of the replica, as in "
         "the event files"),
        ("edit.iterations.target", GAUGE, "{iteration}", "", "iterations of the training"),
        ("edit.tokens", COUNTER, "{token}", "", "tokens on which the replica has trained since its "
         "process began"),
        ("edit.loss", GAUGE, "", "", "training loss of the replica's last iteration, nats per "
         "token; where gradients are averaged, the mean over the replicas"),
        ("edit.validation.loss", GAUGE, "", "", "last validation loss, mean over the replicas"),
        ("edit.round", GAUGE, "{round}", "", "number of the last sync, from 1"),
        ("edit.replicas.active", GAUGE, "{replica}", "", "replicas that took part in the last "
         "sync"),
        ("edit.replicas.expected", GAUGE, "{replica}", "", "N; with a hub N0, with which the run "
         "begins"),
        ("edit.sync.duration", HISTOGRAM, "s", "phase", "seconds of a sync as in `sync.jsonl`, "
         "measured by this replica; phase: " + ", ".join(SYNC_TIMES)),
        ("edit.sync.sent", COUNTER, "By", "", "payload sent by the ranks of the replica in syncs"),
        ("edit.sync.updates", COUNTER, "{update}", "verdict", "updates of single units that the "
         "replica contributed; verdict: accepted, or why it was rejected: "
         + ", ".join(VERDICTS[1:])),
        ("edit.sync.rollbacks", COUNTER, "{unit}", "", "units that went back to their anchor"),
        ("edit.weight", GAUGE, "", "", "weight of the replica in the last sync, mean over the "
         "units"),
        ("edit.effective_replicas", GAUGE, "{replica}", "", "1 / sum of squared weights, mean over "
         "the units"),
        ("edit.clip", GAUGE, "", "", "clip factor, mean over the units; 1 is no clip"),
        ("edit.z_score", GAUGE, "", "", "standard deviations of the replica's norm above its "
         "history, largest of all units"),
        ("edit.run.ends", COUNTER, "{end}", "exit_code", "ends of the training; exit code 3: drift "
         "was found, 4: a replica was lost"),
    )
)  # fmt: skip


class Telemetry(Listener):
    """Metrics and spans of one replica, on its writer rank.

    Args:
        replica: number or name of the replica.
        otlp: whether to send them over OTLP where the process has no providers.
        port: at which Prometheus scrapes this process; None for no Prometheus.
    """

    def __init__(self, replica: str, *, otlp: bool, port: int | None) -> None:
        self._replica, self._otlp, self._port = replica, otlp, port
        self._server: Any = None
        self._own: list[Any] = []  # providers
        self._ids: Any = None
        self._tracer: Tracer | None = None
        self._gauges: dict[str, float] = {}  # last values
        self._recorders: dict[str, list[Callable[..., None]]] = {}
        self._exit_code = 0

    def listen(self) -> None:
        """Open the port for Prometheus, if there is one.

        Raises:
            UsageError: it cannot be opened.
        """
        if self._port is None:
            return
        from prometheus_client import start_http_server

        host = os.environ.get("OTEL_EXPORTER_PROMETHEUS_HOST", "")
        try:
            self._server, _ = start_http_server(self._port, host or "0.0.0.0")
        except OSError as error:
            raise UsageError(
                f"{flag('metrics_port')} ({host or 'any address'}, port {self._port})",
                f"cannot be listened at ({error.strerror})",
                "give another port: replica r uses the given one + r",
                is_local=True,
            ) from error

    def begin(self, attributes: Mapping[str, str], target: int, num_replicas: int) -> bool:
        """Find or make the providers; return whether there are any.

        Args:
            attributes: of the process, for providers that it makes.
            target: iterations of the training.
            num_replicas: N, or N0 with a hub.
        """
        is_wanted = self._otlp or self._port is not None
        if not is_wanted and "opentelemetry" not in sys.modules:  # then there are no providers
            return False
        from opentelemetry import metrics, trace

        tracer, meter = _unless_idle(trace.get_tracer_provider(), metrics.get_meter_provider())
        meters = [meter]
        if is_wanted:
            from megatron_edit.observe import otel_sdk

            show_one_warning("opentelemetry")
            theirs = {otel_sdk.TRACES: tracer, otel_sdk.METRICS: meter}
            signals = [name for name in theirs if self._otlp and theirs[name] is None]
            mine = otel_sdk.make_providers(signals, attributes, has_port=self._port is not None)
            self._own = [provider for provider in mine if provider is not None]
            if mine[0] is not None:
                tracer, self._ids = mine[0], mine[0].id_generator
            meters.append(mine[1])
        if tracer is not None:
            self._tracer = tracer.get_tracer(_SCOPE, __version__)
        if found := [each.get_meter(_SCOPE, __version__) for each in meters if each is not None]:
            self._recorders = {
                each.name: [self._create(meter, each) for meter in found] for each in INSTRUMENTS
            }
        self._put({"edit.iterations.target": target, "edit.replicas.expected": num_replicas})
        self._put({"edit.sync.rollbacks": 0})  # counters begin at 0, so that rates are right
        for verdict in VERDICTS:
            self._put({"edit.sync.updates": 0}, verdict=verdict)
        return bool(self._tracer or found)

    def on_iteration(self, iteration: Iteration) -> None:
        """Record a finished inner iteration."""
        self._put({
            "edit.iterations.done": iteration.iteration, "edit.tokens": iteration.tokens,
            "edit.loss": iteration.loss,
        })  # fmt: skip

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation of all replicas; of several sets, the last one."""
        if evaluation.split == VALIDATION:
            self._put({"edit.validation.loss": evaluation.loss})

    def on_sync(self, report: SyncReport) -> None:
        """Record a finished sync."""
        decision, names = report.decision, replica_names(report)
        me = names.index(self._replica)
        self._put({
            "edit.round": report.round,
            "edit.replicas.active": len(names),
            "edit.sync.sent": report.wire_bytes,
            "edit.sync.rollbacks": int(decision.rollback.sum()),
            "edit.weight": decision.weights[me].mean().item(),
            "edit.effective_replicas": effective_replicas(decision.weights).mean().item(),
            "edit.clip": finite_mean(report.clip),
            "edit.z_score": largest_finite(decision.verdict.scores[me]),
        })  # fmt: skip
        for phase in SYNC_TIMES:
            self._put({"edit.sync.duration": report.seconds[phase]}, phase=phase)
        for row in decision.reasons():
            self._put({"edit.sync.updates": 1}, verdict=row[me] or ACCEPTED)
        if self._tracer is not None:
            if self._ids is not None:
                self._ids.next_trace = trace_id_of(report)  # one trace of all replicas
            write_spans(self._tracer, report, self._replica)

    def on_end(self, ending: Ending) -> None:
        """Record how training ended."""
        self._exit_code = ending.exit_code
        self._put({"edit.run.ends": 1}, exit_code=str(ending.exit_code))

    def close(self) -> None:
        """Export what remains and close the port. Idempotent.

        Blocks: for some seconds at most; after drift for `LINGER_SECONDS`, if there is a port.
        """
        server, own = self._server, self._own
        self._server, self._own, self._tracer, self._recorders = None, [], None, {}
        if server is not None:
            if self._exit_code == DriftError.exit_code:
                before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun terminates it
                time.sleep(LINGER_SECONDS)
                signal.signal(signal.SIGTERM, before)
            server.shutdown()
            server.server_close()
        for provider in own:
            finish_within(EXPORT_SECONDS, provider.shutdown, "telemetry")

    def _put(self, values: Mapping[str, float], **attributes: str) -> None:
        """Record the finite ones of some values."""
        for name, value in values.items():
            if math.isfinite(value):
                for record in self._recorders.get(name, ()):
                    record(value, {"replica": self._replica, **attributes})

    def _create(self, meter: Meter, instrument: Instrument) -> Callable[..., None]:
        """Create an instrument; return what records a value of it."""
        name, kind, unit, _, meaning = instrument
        record: Callable[..., None]
        if kind == COUNTER:
            record = meter.create_counter(name, unit, meaning).add
            return record
        if kind == HISTOGRAM:
            record = meter.create_histogram(
                name, unit, meaning, explicit_bucket_boundaries_advisory=BUCKETS
            ).record
            return record

        # Not a synchronous gauge: older SDKs export one only once after it has been set.
        def observe(_: CallbackOptions) -> Iterator[Observation]:
            from opentelemetry.metrics import Observation

            if (value := self._gauges.get(name)) is not None:
                yield Observation(value, {"replica": self._replica})

        meter.create_observable_gauge(name, [observe], unit, meaning)
        return lambda value, _: self._gauges.update({name: value})


def check_telemetry(*, otlp: bool, port: int | None, num_replicas: int) -> None:
    """Check packages, variables of the environment, and the range of the ports.

    Args:
        otlp: whether to send metrics and spans over OTLP.
        port: for Prometheus, of replica 0; None for no Prometheus.
        num_replicas: of this run, each of which needs a port.

    Raises:
        UsageError: telemetry cannot be had in this way.
    """
    if port is not None:
        value = f"{flag('metrics_port')} {port}"
        require_package(value, "opentelemetry.exporter.prometheus", METRICS_EXTRA)
        if port + num_replicas - 1 > _LARGEST_PORT:
            raise UsageError(
                value,
                f"{num_replicas} replicas use one port each from this one on, and the largest is "
                f"{_LARGEST_PORT}",
                "give a smaller port",
            )
    if not otlp:
        return
    require_package(flag("telemetry"), "opentelemetry.exporter.otlp.proto.http", METRICS_EXTRA)
    from megatron_edit.observe import otel_sdk

    try:
        for provider in otel_sdk.make_providers(otel_sdk.SIGNALS, {}, has_port=False):
            if provider is not None:
                provider.shutdown()
    except Exception as error:  # of any type: what the SDK makes of its variables
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(
            f"{flag('telemetry')} (OTEL_...)",
            f"OpenTelemetry refuses a variable of the environment ({text})",
            "correct or unset it",
        ) from error


def write_spans(tracer: Tracer, report: SyncReport, replica: str, ended: int | None = None) -> None:
    """Write the spans of a sync when it has landed: the whole, and its phases.

    The durations are measured. How the phases interleave is not recorded: their spans follow each
    other.

    Args:
        tracer: gets the spans. A span that is current becomes the parent of the whole.
        report: of the sync.
        replica: number or name of this replica.
        ended: Unix time of the last landing in nanoseconds; None: now.
    """
    from opentelemetry.trace import set_span_in_context

    ended = time.time_ns() if ended is None else ended
    start = ended - int(report.seconds["total"] * 1e9)
    attributes = {
        "edit.replica": replica, "edit.round": report.round, "megatron.iteration": report.step,
        "edit.num_replicas": len(report.inner_steps), "edit.sync.sent": report.wire_bytes,
        "edit.sync.rejected": int(report.decision.verdict.anomalous.sum()),
    }  # fmt: skip
    whole = tracer.start_span(SYNC, start_time=start, attributes=attributes)
    inside = set_span_in_context(whole)
    for name, kind in zip(PHASES, ("wait", "exchange", "outer", "total"), strict=True):
        end = min(ended, start + int(report.seconds[kind] * 1e9))
        tracer.start_span(name, inside, start_time=start).end(end)
        start = end
    whole.end(ended)


def trace_id_of(report: SyncReport) -> int:
    """Return an id of the sync that is the same on all replicas, and differs between syncs.

    It is a digest of what all replicas have gathered: no communication.
    """
    decision = report.decision
    digest = blake2b(digest_size=16)
    digest.update(f"{report.round} {list(report.samples)}".encode())
    for table in (decision.norms, decision.weights):
        digest.update(table.double().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()) or 1


def _unless_idle(*providers: Any) -> list[Any]:
    """Return providers, and None for one of OpenTelemetry's API, which does nothing."""
    idle = ("opentelemetry.trace", "opentelemetry.metrics")
    return [None if type(each).__module__.startswith(idle) else each for each in providers]
