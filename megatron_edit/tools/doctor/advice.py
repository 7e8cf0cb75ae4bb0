"""What the measured links mean for a training: how long a sync takes, and how often to sync."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_edit.comm.collectives import all_reduce_payload
from megatron_edit.config import GOAL_SHARE, EditConfig
from megatron_edit.constants import FP32_BYTES
from megatron_edit.tools.doctor.finding import DoctorFinding, Level
from megatron_edit.tools.doctor.links import MeasuredLink, Together

MOST_SKEW_SECONDS = 1.0
_INT8_BYTES = 1


def link_findings(links: list[MeasuredLink]) -> Iterator[DoctorFinding]:
    """Lines about the ways between replicas, and their clocks."""
    for link in links:
        name = f"replica {link.source} to {link.target}"
        rates = link.forward_bytes_per_second, link.backward_bytes_per_second
        text = f"{_rate(rates[0])} there, {_rate(rates[1])} back, "
        yield DoctorFinding(name, text + f"round trip {link.round_trip_seconds * 1e3:.2f} ms")
        skew = f"{link.clock_offset_seconds * 1e3:+.2f} ms (+-{link.clock_error_seconds * 1e3:.2f})"
        is_far = abs(link.clock_offset_seconds) > MOST_SKEW_SECONDS
        yield DoctorFinding(
            f"clock of replica {link.target} against {link.source}",
            skew,
            Level.HINT if is_far else Level.OK,
            "run NTP or chrony: log lines of replicas cannot be compared" if is_far else "",
        )


def sync_findings(
    together: Together, num_replicas: int, ranks: int, parameters: int, step_seconds: float
) -> Iterator[DoctorFinding]:
    """Lines about a sync among all replicas.

    Args:
        together: of one rank; all of a replica's were measured at once.
        num_replicas: N.
        ranks: of one replica, K.
        parameters: of the model.
        step_seconds: of one inner step.
    """
    rate = together.bytes_per_second * ranks
    yield DoctorFinding(
        "all-reduce among the replicas",
        f"{_rate(rate)} sent per replica, latency {together.latency_seconds * 1e3:.2f} ms",
    )
    seconds = all_reduce_payload(FP32_BYTES * parameters, num_replicas) / rate
    interval = max(1, round(seconds / (GOAL_SHARE * step_seconds)))
    usual = EditConfig().sync_interval
    value = f"{seconds:.1f} s ({parameters / 1e9:g} billion parameters, fp32, {ranks} ranks each)"
    if interval <= usual:
        yield DoctorFinding("a sync", value)
        return
    coded = max(1, round(interval * _INT8_BYTES / FP32_BYTES))
    delay = max(1, round(seconds * _INT8_BYTES / FP32_BYTES / step_seconds))
    yield DoctorFinding(
        "a sync",
        value,
        Level.HINT,
        f"at {step_seconds:g} s per step --edit-sync-interval {usual} spends more than "
        f"{GOAL_SHARE:.0%} of the time on it: use {interval}, "
        f"or --edit-sync-dtype int8 with {coded}"
        + (f", or hide int8 with --edit-delay-steps {delay} at some loss" if delay < usual else ""),
    )


def _rate(bytes_per_second: float) -> str:
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.2f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"
