"""OpenTelemetry metrics of a replica: names, units, meanings, and their values.

Each replica reports itself alone, on its writer rank. Values are computed from the records of the
event files: nothing is gathered or measured in addition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from megatron_edit.constants import BAD_LOSS, NO_STEP, NON_FINITE, OUTLYING_NORM, SYNC_TIMES
from megatron_edit.engine import SyncReport
from megatron_edit.method.weights import effective_replicas
from megatron_edit.observe.records import VALIDATION, Ending, Evaluation, Iteration
from megatron_edit.observe.reports import replica_names

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"
ACCEPTED = "accepted"
VERDICTS = (ACCEPTED, OUTLYING_NORM, BAD_LOSS, NON_FINITE, NO_STEP)
# Upper bounds in seconds: from a sync in one machine to one that waits for a slow replica.
BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


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
         "token; in warm-up the mean over the replicas"),
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


class Instruments:
    """The metrics of one replica.

    Args:
        meters: each gets all values.
        replica: number or name of the replica.
    """

    def __init__(self, meters: Sequence[Meter], replica: str) -> None:
        self._replica = replica
        self._gauges: dict[str, float] = {}  # last values
        self._recorders = {
            each.name: [self._create(meter, each) for meter in meters] for each in INSTRUMENTS
        }

    def begin(self, target: int, num_replicas: int) -> None:
        """Record what is known before training. Counters begin at 0, so that rates are right.

        Args:
            target: iterations of the training.
            num_replicas: N, or N0 with a hub.
        """
        self._put("edit.iterations.target", target)
        self._put("edit.replicas.expected", num_replicas)
        self._put("edit.sync.rollbacks", 0)
        for verdict in VERDICTS:
            self._put("edit.sync.updates", 0, verdict=verdict)

    def on_iteration(self, iteration: Iteration) -> None:
        """Record a finished inner iteration."""
        self._put("edit.iterations.done", iteration.iteration)
        self._put("edit.tokens", iteration.tokens)
        self._put("edit.loss", iteration.loss)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation of all replicas; of several sets, the last one."""
        if evaluation.split == VALIDATION:
            self._put("edit.validation.loss", evaluation.loss)

    def on_sync(self, report: SyncReport) -> None:
        """Record a finished sync."""
        decision, names = report.decision, replica_names(report)
        me = names.index(self._replica)
        self._put("edit.round", report.round)
        self._put("edit.replicas.active", len(names))
        for phase in SYNC_TIMES:
            self._put("edit.sync.duration", report.seconds[phase], phase=phase)
        self._put("edit.sync.sent", report.wire_bytes)
        for row in decision.reasons():
            self._put("edit.sync.updates", 1, verdict=row[me] or ACCEPTED)
        self._put("edit.sync.rollbacks", int(decision.rollback.sum()))
        self._put("edit.weight", decision.weights[me].mean().item())
        effective = effective_replicas(decision.weights)
        self._put("edit.effective_replicas", effective.mean().item())
        self._put("edit.clip", _finite(report.clip).mean().item())
        if (scores := _finite(decision.verdict.scores[me])).numel():
            self._put("edit.z_score", scores.max().item())

    def on_end(self, ending: Ending) -> None:
        """Record how training ended."""
        self._put("edit.run.ends", 1, exit_code=str(ending.exit_code))

    def _put(self, name: str, value: float, **attributes: str) -> None:
        """Record a value, unless it is not finite."""
        if math.isfinite(value):
            for record in self._recorders[name]:
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

        def keep(value: float, _: Mapping[str, str]) -> None:
            self._gauges[name] = value

        meter.create_observable_gauge(name, [observe], unit, meaning)
        return keep


def _finite(values: Tensor) -> Tensor:
    return values[values.isfinite()]
