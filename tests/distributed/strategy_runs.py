"""Runs of the engine over real process groups, compared with the strategy oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_edit.config import EditConfig
from megatron_edit.engine import EditEngine
from megatron_edit.method.clock import NANOSECONDS, PhaseClock
from tests.distributed.test_rounds import SIZES, Moves
from tests.distributed.toy import ToyHost, build_engine, with_outer
from tests.harness import RankResult, run_ranks
from tests.reference import published
from tests.reference.oracle import OracleSettings
from tests.reference.outer_rules import AVERAGING, PENALIZED, StrategySettings, settings_for
from tests.reference.schedules import QsrSchedule
from tests.reference.strategies import Simulation

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


# ---- Runs of the engine over real process groups, compared with the strategy oracle


SCENARIOS = "tests.distributed.strategy_runs"
Settings = dict[str, Any]

# Names of EditConfig -> names of the oracle.
_STRATEGY_NAMES = {"sync_interval": "tau", "delay_steps": "delay"}
_PENALTY_NAMES = {
    "anomaly_warmup_syncs": "warmup_syncs",
    "anomaly_threshold": "threshold",
    "clip": "max_norm",
}


@dataclass(frozen=True)
class Frame:
    """What the oracle expects after a step.

    Attributes:
        theta: parameters, theta[replica][unit].
        anchor: of the units without a sync in flight.
        momentum: of the same units, where the strategy has one.
    """

    theta: list[dict[str, Any]]
    anchor: dict[str, Any]
    momentum: dict[str, Any]


def oracle_settings(config: Settings) -> StrategySettings:
    """The oracle's settings of a configuration; missing ones are the presets of the strategy."""
    ours = {_STRATEGY_NAMES.get(n, n): v for n, v in config.items()}
    strategy = ours.pop("strategy")
    penalty = {_PENALTY_NAMES[n]: ours.pop(n) for n in _PENALTY_NAMES if n in ours}
    for name in ("interval", "qsr_a", "sync_dtype"):  # settings of the schedule and of the wire
        ours.pop(name, None)
    if strategy in PENALIZED:
        ours["penalty"] = OracleSettings(**penalty)
    return settings_for(strategy, **{"warmup_steps": 0, **ours})


def expected_frames(simulation: Simulation, moves: Moves, lrs: list[float]) -> list[Frame]:
    """States of the oracle after each step; training ends with the last move."""
    frames = []
    for step, (row, lr) in enumerate(zip(moves, lrs, strict=True), start=1):
        simulation.step(row, lr=lr, last=step == len(moves))
        in_flight = {
            name
            for group in simulation.pending
            for name in simulation.units_of(group)
            if simulation.settings.strategy != "co2"  # which always has one in flight
        }
        settled = [n for n in simulation.anchor if n not in in_flight]
        has_momentum = simulation.settings.strategy not in AVERAGING
        frames.append(
            Frame(
                [dict(theta) for theta in simulation.theta],
                {n: simulation.anchor[n] for n in settled},
                {n: simulation.momentum[n] for n in settled if has_momentum},
            )
        )
    return frames


def assert_follows(
    results: list[RankResult], frames: list[Frame], ranks: int, warmup: int, slack: float = 0.0
) -> None:
    """Assert that every rank had its slice of the oracle's state after every step.

    Args:
        results: states of the ranks.
        frames: states of the oracle.
        ranks: of a replica.
        warmup: steps before there are anchors.
        slack: error of the wire dtype that is allowed in addition to the rounding of fp32.
    """
    for result in results:
        replica = result.rank // ranks
        for step, (ours, frame) in enumerate(zip(result.value, frames, strict=True), start=1):
            full_units = {"theta": frame.theta[replica]}
            if step >= warmup:
                full_units |= {"anchor": frame.anchor, "momentum": frame.momentum}
            for key, units in full_units.items():
                for name, full in units.items():
                    # fp32 sums against float64 sums: errors grow with the size of the addends.
                    finite = full[np.isfinite(full)]
                    size = max(1.0, np.abs(finite).max(initial=0.0))
                    np.testing.assert_allclose(
                        ours[key][name],
                        full[ours["slices"][name]],
                        rtol=1e-5,
                        atol=2e-6 * size + slack,
                        err_msg=f"{key} of {name}, replica {replica}, after step {step}",
                    )


def assert_ends_in_anchor(results: list[RankResult], ranks: int) -> None:
    """Assert that after the last step parameters and anchor are bitwise equal on all replicas."""
    for result in results:
        first, last = results[result.rank % ranks].value[-1], result.value[-1]
        for name in SIZES:
            np.testing.assert_array_equal(last["theta"][name], first["theta"][name])
            np.testing.assert_array_equal(last["theta"][name], last["anchor"][name])


def run_both(
    config: Settings, world: tuple[int, int], moves: Moves, start: Any, lrs: list[float],
    slack: float = 0.0,
) -> tuple[list[RankResult], Simulation, list[Frame]]:  # fmt: skip
    """Run engine and oracle, and compare their states; see `assert_follows`."""
    num_replicas, ranks = world
    warmup = config.get("warmup_steps", 0)
    for row in moves[:warmup]:
        row[:] = [row[0]] * num_replicas
    settings = {"num_replicas": num_replicas, "warmup_steps": warmup, **config}
    oracle = replace(oracle_settings(config), ranks=ranks)
    simulation = Simulation.start(num_replicas, start, oracle)
    if config.get("interval") == "qsr":
        tau, a = config["sync_interval"], config["qsr_a"]
        schedule = QsrSchedule(tau, a, lambda s: lrs[s - 1], warmup, config.get("delay_steps", 0))
        simulation = replace(simulation, schedule=schedule)
    frames = expected_frames(simulation, moves, lrs)
    results = run_ranks(
        f"{SCENARIOS}:run_steps",
        num_replicas * ranks,
        (settings, SIZES, start, moves, lrs),
        check=True,
    )
    assert_follows(results, frames, ranks, warmup, slack)
    assert_ends_in_anchor(results, ranks)
    return results, simulation, frames
