"""OpenTelemetry spans of a sync, built from its report when it has landed.

The durations are those that the engine measured. How the phases interleave is not recorded: the
spans of a sync are laid out one after another, from the meeting to the end of the landing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

from megatron_edit.engine import SyncReport

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

SYNC = "edit.sync"
MEETING, EXCHANGE, OUTER_STEP, LANDING = PHASES = (
    "edit.meeting", "edit.exchange", "edit.outer_step", "edit.landing"
)  # fmt: skip
_NANOSECONDS = 1e9
_TRACE_ID_BYTES = 16


def write_spans(
    tracers: Sequence[Tracer], report: SyncReport, replica: str, ended: int | None = None
) -> None:
    """Write the spans of a sync: the whole, and its phases.

    Args:
        tracers: each gets all spans. A span that is current becomes the parent of the whole.
        report: of the sync.
        replica: number or name of this replica.
        ended: Unix time of the last landing in nanoseconds; None: now.
    """
    from opentelemetry.trace import set_span_in_context

    ended = time.time_ns() if ended is None else ended
    began = ended - _nanoseconds(report.seconds["total"])
    attributes = {
        "edit.replica": replica, "edit.round": report.round, "megatron.iteration": report.step,
        "edit.num_replicas": len(report.inner_steps), "edit.sync.sent": report.wire_bytes,
        "edit.sync.rejected": int(report.decision.verdict.anomalous.sum()),
    }  # fmt: skip
    for tracer in tracers:
        whole = tracer.start_span(SYNC, start_time=began, attributes=attributes)
        inside = set_span_in_context(whole)
        for name, start, end in phases(report, began, ended):
            tracer.start_span(name, inside, start_time=start).end(end)
        whole.end(ended)


def phases(report: SyncReport, began: int, ended: int) -> Iterator[tuple[str, int, int]]:
    """Yield name, begin and end of each phase of a sync.

    Args:
        report: of the sync.
        began: Unix time of its start in nanoseconds.
        ended: of its last landing.
    """
    start = began
    for name, kind in zip(PHASES, ("wait", "exchange", "outer"), strict=False):
        end = min(ended, start + _nanoseconds(report.seconds[kind]))
        yield name, start, end
        start = end
    yield LANDING, start, ended


def trace_id_of(report: SyncReport) -> int:
    """Return an id of the sync that is the same on all replicas, and differs between syncs.

    It is a digest of what all replicas have gathered: no communication.
    """
    decision = report.decision
    digest = blake2b(digest_size=_TRACE_ID_BYTES)
    digest.update(f"{report.round} {list(report.samples)}".encode())
    for table in (decision.norms, decision.weights):
        digest.update(table.double().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") or 1


def _nanoseconds(seconds: float) -> int:
    return int(seconds * _NANOSECONDS)
