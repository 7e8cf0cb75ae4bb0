"""Functions that ranks of the strategy tests run: steps of a toy host, its state after each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_edit.config import EditConfig
from megatron_edit.engine import EditEngine
from megatron_edit.method.clock import NANOSECONDS, PhaseClock
from tests.distributed.toy import ToyHost, build_engine, with_outer
from tests.reference import published

Record = dict[str, Any]


def run_steps(
    settings: dict[str, Any],
    sizes: dict[str, int],
    start: dict[str, Any],
    moves: list[list[dict[str, Any]]],
    lrs: Sequence[float],
) -> list[Record]:
    """Make one step per `moves[step][replica]`; training ends with the last.

    In warm-up the moves of all replicas must be equal: the toy has no gradients to average.

    Returns:
        The state of this rank after every step, from step 1 on.
    """
    engine, host, reporter = build_engine(_config(settings), sizes, start)
    host.next_lr = lrs[0]
    engine.start()
    replica = engine.groups.sync.rank
    records = []
    for step, (row, lr) in enumerate(zip(moves, lrs, strict=True), start=1):
        host.lr, host.is_last = lr, step == len(moves)
        host.next_lr = lr if host.is_last else lrs[step]
        _step(engine, host, row[replica])
        counted = {
            "sent": engine.groups.sync.payload_bytes + engine.groups.meeting.payload_bytes,
            "reported": [(report.wire_bytes, len(report.units)) for report in reporter.syncs],
        }
        records.append(_state_of(engine, host) | counted)
    return records


def run_timed(
    settings: dict[str, Any],
    sizes: dict[str, int],
    start: dict[str, Any],
    moves: list[list[dict[str, Any]]],
    step_seconds: Sequence[float],
    target: int,
) -> tuple[list[Record], list[tuple[int, tuple[int, ...]]]]:
    """Move by `moves[replica][own step]`, each replica at its own speed, until all is consumed.

    Time is simulated: a step of replica r takes `step_seconds[r]`, and a meeting no time.

    Returns:
        The state of this rank after each of its steps; and for every sync, the index in `sizes` of
        its first unit, and the steps of all replicas since the last meeting.
    """
    now = [0]
    clock = PhaseClock(read=lambda: now[0])
    engine, host, reporter = build_engine(
        _config(settings), sizes, start, clock=clock, target=target
    )
    # Heartbeats come in real time: what they tell about the arrival of other replicas is ignored.
    engine._board.heartbeat.latest_arrival = lambda: 0.0  # type: ignore[method-assign]
    engine.start()
    replica, records = engine.groups.sync.rank, []
    for move in moves[replica]:
        if engine._trigger.is_over:
            break
        now[0] += round(step_seconds[replica] * NANOSECONDS)
        _step(engine, host, move)
        records.append(_state_of(engine, host))
    assert engine._trigger.is_over, "there are too few moves"
    engine.finish()
    names = list(sizes)
    syncs = [
        (names.index(r.units[0]), tuple(r.inner_steps))
        for r in sorted(reporter.syncs, key=lambda report: report.round)
    ]
    return records, syncs


def run_table(
    settings: dict[str, Any],
    start: dict[str, Any],
    moves: list[dict[str, Any]],
    starts: dict[int, Sequence[int]],
) -> list[Record]:
    """Move all replicas by `moves[step]`; syncs start after the steps of the table `starts`."""
    sizes = {name: len(values) for name, values in start.items()}
    engine, host, _ = build_engine(_config(settings), sizes, start, starts)
    engine.start()
    records = []
    for move in moves:
        _step(engine, host, move)
        records.append(_state_of(engine, host))
    return records


def train_linear(settings: dict[str, Any], steps: int) -> list[tuple[float, Record]]:
    """Train the linear model of MaxText's test; returns the loss before and state after each step.

    Its weights are the unit `embedding`, its bias the unit `final`; replicas of one rank.
    """
    start = {"embedding": published.MAXTEXT_START["w"], "final": published.MAXTEXT_START["b"]}
    sizes = {name: len(values) for name, values in start.items()}
    engine, host, _ = build_engine(_config(settings), sizes, start)
    engine.start()
    records = []
    for _ in range(steps):
        w, b = (host.full[name].numpy().astype(np.float64) for name in ("embedding", "final"))
        loss, slopes = published.maxtext_gradients(engine.groups.sync.rank, w, b)
        move = {"embedding": slopes["w"], "final": slopes["b"]}
        _step(engine, host, {n: -published.MAXTEXT_RATE * g for n, g in move.items()})
        records.append((loss, _state_of(engine, host)))
    return records


def _config(settings: dict[str, Any]) -> EditConfig:
    return EditConfig(use_edit=True, digest_interval=1, **with_outer(settings))


def _step(engine: EditEngine, host: ToyHost, move: dict[str, Any]) -> None:
    engine.before_step()
    host.move(move)
    engine.after_step()


def _state_of(engine: EditEngine, host: ToyHost) -> Record:
    """This rank's slices of the parameters and, after the switch, of anchor and momentum."""
    state = engine.syncs.outer if engine.syncs.has_outer_state else None
    units = {} if state is None else state.units
    return {
        "slices": host.slices,
        "theta": {n: values.numpy().copy() for n, values in host.full.items()},
        "anchor": {n: u.anchor.numpy().copy() for n, u in units.items()},
        "momentum": {n: u.momentum.numpy().copy() for n, u in units.items()},
    }
