"""Hooks that record the state of a run: all that a checkpoint restores, rates, biases, moments."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch

from tests.harness.ranks import use_full_mock_data
from tests.host.spy import out_dir, record


def record_all() -> None:
    """Record losses, norms, batches and parameters, momentum, anchor, detectors, moments, schedule.

    Also runs the hooks of `spy_speeds` that `SPY_HOOKS` names.
    """
    from megatron_edit.engine import EditEngine

    record()
    record_fetched()
    if os.environ.get("SPY_HOOKS"):
        from tests.host.spy_speeds import hooks

        hooks()
    rank = os.environ["RANK"]
    finish = EditEngine.finish

    def spied(self: EditEngine) -> None:
        finish(self)
        (out_dir() / f"outer-{rank}.json").write_text(json.dumps(_state_of(self)))

    EditEngine.finish = spied  # type: ignore[method-assign]


def _state_of(engine: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"step": engine.status.step, "round": engine.state.rounds.count}
    if engine.syncs.has_outer_state:
        shards = engine.host.plan.shards
        counted = {s.name for s in shards if any(f.is_counted for f in s.params)}
        for name, unit in engine.syncs.outer.units.items():
            state[f"anchor {name}"] = _digest([unit.anchor])
            state[f"momentum {name}"] = _digest([unit.momentum])
            # A tied copy takes the bits of the first copy: its own residual has no effect.
            if unit.residual is not None and name in counted:
                state[f"residual {name}"] = _digest([unit.residual.sent, unit.residual.summed])
        state["unit steps"] = engine.state.rounds.unit_steps.tolist()
        state["detectors"] = _digest(vars(engine.state.rounds.detectors).values())
    state["gradients"] = [
        _digest([residual.sent, residual.summed]) for residual in engine._gradients._residuals
    ]
    state["moments"] = [_moments(inner) for inner in engine.host._inner]
    state["copies"] = _copies(engine.host)
    state["schedule"] = engine.host.progress().schedule_position
    state["samples"] = engine.host.progress().samples
    return state


def _copies(host: Any) -> dict[str, str]:
    """Return digests of the moments of parameters of which other ranks hold copies."""
    found = {}
    for shard in host.plan.shards:
        for kind in ("first", "second"):
            values = torch.zeros(shard.numel)
            host.read_moments(shard, kind, values)
            for tie in {param.tie for param in shard.params} - {None}:
                params = zip(shard.params, shard.slices, strict=True)
                copies = [values[where] for param, where in params if param.tie == tie]
                found[f"{tie} {shard.name} {kind}"] = _digest(copies)
    return found


def _moments(inner: Any) -> str:
    values = [] if inner.optimizer is None else list(inner.optimizer.state.values())
    # By name: a load may restore them in another order.
    return _digest(v for s in values for _, v in sorted(s.items()) if isinstance(v, torch.Tensor))


def _digest(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def record_fetched() -> None:
    """Write the samples that this rank fetches, at each fetch, as a run may end at any point."""
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    fetched: list[list[int]] = []
    fetch = _MapDatasetFetcher.fetch
    file = out_dir() / f"fetched-{os.environ['RANK']}.json"

    def spied(self: Any, indices: Any) -> Any:
        fetched.append(list(indices))
        file.write_text(json.dumps(fetched))
        return fetch(self, indices)

    _MapDatasetFetcher.fetch = spied


# ---- learning rates


def record_rates() -> None:
    """Append, before each optimizer step of a round, a line: process, samples that are committed,
    step of the round from 0, and learning rate and weight decay of each group."""
    from megatron_edit.engine import EditEngine

    before_step = EditEngine.before_step

    def spied(self: EditEngine) -> None:
        before_step(self)
        if (assignment := self.state.rounds.assignment) is None:
            return  # in the warm-up
        groups = [
            (group["lr"], group["weight_decay"])
            for inner in self.host._inner  # type: ignore[attr-defined]
            for group in inner.optimizer.param_groups
        ]
        samples = self.host.samples_of(assignment.num_consumed)
        line = [os.getpid(), samples, self.status.inner_steps, groups]
        with (out_dir() / f"rates-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    EditEngine.before_step = spied  # type: ignore[method-assign]


def halve_rates() -> None:
    """Halve all rates of Megatron's schedule after the step `SPY_STEP`, of eight samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    step, first = OptimizerParamScheduler.step, 8 * int(os.environ["SPY_STEP"])

    def spied(self: OptimizerParamScheduler, increment: int) -> None:
        if self.num_steps < first <= self.num_steps + increment:
            self.start_wd, self.end_wd = self.start_wd / 2, self.end_wd / 2
            for group in self.optimizer.param_groups:
                group.update({name: group[name] / 2 for name in ("max_lr", "min_lr")})
        step(self, increment)

    OptimizerParamScheduler.step = spied


# ---- biases of routers


def record_biases() -> None:
    """Write this rank's router biases, by step: before each meeting and after each step."""
    from megatron_edit.engine import EditEngine
    from megatron_edit.engine.rounds.meeting import Meetings, shared_values

    use_full_mock_data()  # with other samples the coarse biases may agree by chance
    rank, log = os.environ["RANK"], dict[str, dict[int, list[float]]](before={}, after={})
    exchange, after_step = Meetings.exchange_records, EditEngine.after_step

    def exchanged(self: Meetings, *args: Any, **kwargs: Any) -> Any:
        log["before"][self.state.step] = shared_values(self.host)
        return exchange(self, *args, **kwargs)

    def stepped(self: EditEngine, *args: Any) -> Any:
        result = after_step(self, *args)
        log["after"][self.status.step] = shared_values(self.host)
        (out_dir() / f"biases-{rank}.json").write_text(json.dumps(log))
        return result

    Meetings.exchange_records = exchanged  # type: ignore[method-assign]
    EditEngine.after_step = stepped  # type: ignore[method-assign]


def count_in_integers() -> None:
    """Record the run, with routers that count tokens in integers."""
    from megatron.core.transformer.moe.router import TopKRouter

    record()
    init = TopKRouter.__init__

    def made(self: TopKRouter, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.local_tokens_per_expert = self.local_tokens_per_expert.int()

    TopKRouter.__init__ = made


# ---- moments


def record_moments() -> None:
    """Record the step count, and what `spy.record` does."""
    record()
    record_first_moments()


def record_first_moments() -> None:
    """Write the largest step count of the inner optimizer, before its first local step."""
    import megatron.training.training as training

    train_step = training.train_step

    @wraps(train_step)
    def spied(*args: Any, **kwargs: Any) -> Any:
        path = out_dir() / "first-counter.txt"
        if not path.exists():
            optimizer = args[3]
            inner = getattr(optimizer, "chained_optimizers", [optimizer])[0].optimizer
            states = inner.state.values()
            counts = [float(state["step"]) for state in states if "step" in state]
            groups = [float(group["step"]) for group in inner.param_groups if "step" in group]
            whole = path.with_suffix(f".{os.getpid()}")  # a reader finds all of the file
            whole.write_text(str(max(counts + groups, default=0.0)))
            whole.rename(path)
        return train_step(*args, **kwargs)

    training.train_step = spied


# ---- measurements of `--edit-auto`


WARMUP = 20  # steps
STEP_SECONDS, FORWARD_SECONDS, LATENCY = 0.1, 0.02, 1e-3


def record_with_fixed_measurements() -> None:
    """Record the state of all ranks, with fixed measurements instead of this machine's.

    SPY_RATES: bytes per second of a rank at the first choice, and later, separated by a comma.
    SPY_DEVIATES: whether the first choice's prediction is left as soon as there are enough syncs,
    and a later one's never.
    SPY_FACTORS: seconds of a step of each replica, as of the scripted clock; else all have
    `STEP_SECONDS`.
    """
    import megatron_edit.engine.plan
    import megatron_edit.engine.tuning
    from megatron_edit.method.auto import Measurement, num_judged

    plan: Any = megatron_edit.engine.plan
    tuning: Any = megatron_edit.engine.tuning

    record_all()
    first, later = map(float, os.environ["SPY_RATES"].split(","))
    choose = tuning.AutoTuner.choose
    row = tuning.AutoTuner.row
    rates = iter((first, later))

    def steps_of_constants(self: Any) -> Any:
        averaging = 1e6 / first  # of a million bytes
        return Measurement(STEP_SECONDS, FORWARD_SECONDS, averaging=averaging)

    def choose_by_own_steps(self: Any, *args: Any) -> Any:
        seconds = json.loads(os.environ["SPY_FACTORS"])[self.groups.sync.rank]
        self.meter.steps[:] = [seconds] * len(self.meter.steps)
        self.meter.forwards[:] = [FORWARD_SECONDS] * len(self.meter.forwards)
        return choose(self, *args)

    def row_of_constants(self: Any) -> list[float]:
        self.meter.steps[:] = [STEP_SECONDS] * len(self.meter.steps)
        self.meter.forwards[:] = [FORWARD_SECONDS] * len(self.meter.steps)
        return list(row(self))

    def leaves(choice: Any, exposed: Sequence[float], target: float) -> bool:
        is_first = bool(os.environ.get("SPY_DEVIATES")) and choice.since == WARMUP
        return is_first and len(exposed) == num_judged(choice)

    if "SPY_FACTORS" in os.environ:
        tuning.AutoTuner.choose = choose_by_own_steps
    else:
        tuning.AutoTuner._measured_steps = steps_of_constants
        tuning.AutoTuner.row = row_of_constants
    tuning.measure_links = lambda groups: (next(rates), LATENCY)
    tuning._work_per_element = lambda name, numel, groups: 1e-9
    plan.leaves_prediction = leaves
