"""Loading: Megatron loads each replica's own checkpoint, then the plugin's state is restored.

Megatron loads while the model is built, before the engine exists. The plugin's part of a checkpoint
is restored once the engine is built.
"""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import ValidationError

from megatron_edit.checkpoint.files import REMEDY
from megatron_edit.checkpoint.folder import EDIT, RANDOM, STOCK_METADATA, replica_folder
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.checkpoint.resume import ResumePlan, ResumingRun, plan_resume
from megatron_edit.comm.compressed_all_reduce import Residual
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import DEPLOYMENT, EditConfig
from megatron_edit.constants import ALL, FP32, RESET
from megatron_edit.engine import (
    EditEngine,
    EngineState,
    PendingState,
    RoundState,
    SavedRound,
    round_state,
)
from megatron_edit.errors import UsageError, to_one_line
from megatron_edit.flags import flag, format_value
from megatron_edit.host.batch_stages import check_stages
from megatron_edit.host.checkpoint.choosing import Choice, check_on_all_ranks, choose, layout_of
from megatron_edit.host.checkpoint.outer import LocalPiece, RankPieces
from megatron_edit.host.checkpoint.param_groups import new_rates_kept
from megatron_edit.host.checkpoint.paths import Redirection
from megatron_edit.host.checkpoint.refusals import (
    call_megatron_load,
    check_equal_steps,
    check_pending,
    check_rounds,
    check_samples,
    check_schedule,
    parameters_only,
)
from megatron_edit.host.checkpoint.replica_local import (
    RankShards,
    has_gradient_residuals,
    load_gradients,
    load_outer,
    load_pending,
    load_streams,
)
from megatron_edit.host.model.counters import last_local_iteration
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.seams.patching import Call
from megatron_edit.method.auto import AutoChoice, auto_settings, with_choice
from megatron_edit.method.ledger import IN_ORDER, share_of
from megatron_edit.method.loss_check import LossHistory
from megatron_edit.method.settings import Settings
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.observe.console import say

# What Megatron's `load_checkpoint` returns: iteration and floating-point operations so far.
type Loaded = tuple[int, float]


@dataclass(frozen=True)
class StartingPoint:
    """Where this replica begins, if it is one of those that begin the run.

    Attributes:
        round: commits whose result it has loaded.
        digest: of that state.
    """

    round: int
    digest: str


@dataclass(frozen=True)
class _Resume:
    """A checkpoint of replicas to resume from.

    Attributes:
        load: Megatron's call of `load_checkpoint`.
    """

    choice: Choice
    iteration: int
    manifest: Manifest
    plan: ResumePlan
    load: Call[Loaded]

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.choice.path


class LoadControl:
    """Replaces Megatron's `load_checkpoint`.

    Args:
        world: this process's placement, and the store.
        redirection: of the folders that Megatron reads from.
    """

    def __init__(self, config: EditConfig, world: ReplicaWorld, redirection: Redirection) -> None:
        self.config = config
        self._world = world
        self._redirection = redirection
        self._choice: Choice | None = None
        self._resume: _Resume | None = None
        self._step = 0  # first step of a run without a manifest

    @property
    def warmup_step(self) -> int | None:
        """The step after which a warm-up begins or goes on; None in the rounds."""
        if self._resume is None:
            return self._step
        manifest = self._resume.manifest
        is_warmup = manifest.is_warmup and not manifest.is_final_phase
        return self._resume.plan.entries[0].step if is_warmup else None

    def load(self, call: Call[Loaded]) -> Loaded:
        """Choose and load a checkpoint; return its iteration and floating-point operations."""
        from megatron.training import get_args

        args = get_args()
        scheduler = call.arguments["opt_param_scheduler"]
        schedule = {} if scheduler is None else scheduler.state_dict()
        self._choice = choose(self._world, args, schedule) if args.load else None
        self._resume = self._resume_from(self._choice, args, call)
        if self._resume is None:
            self._step, flops = self._load_stock(call)
            return self._step, flops
        iteration, flops = self._load_replica(self._resume, self._source(self._resume.manifest))
        planned = self._resume.plan.iteration
        return iteration if planned is None else planned, flops

    @property
    def starting_point(self) -> StartingPoint:
        """Where a replica begins that begins an elastic run."""
        manifest = None if self._resume is None else self._resume.manifest
        if manifest is None:
            return StartingPoint(0, "")
        assert self._resume is not None
        completes_round = manifest.is_mid_round and not self._resume.plan.continues
        return StartingPoint(manifest.round + completes_round, manifest.digest)

    @property
    def resumed_from(self) -> dict[str, object] | None:
        """Iteration, samples and steps that this run resumes at; None where training begins."""
        from megatron.training import get_args

        if self._resume is not None:
            plan = self._resume.plan
            steps = [entry.step for entry in plan.entries]
            return {"iteration": steps[0], "samples": plan.consumed, "replica_steps": steps}
        if self._step:  # a checkpoint of stock Megatron: all replicas load the same
            samples = int(get_args().consumed_train_samples)
            steps = [self._step] * self._world.placement.num_replicas
            return {"iteration": self._step, "samples": samples, "replica_steps": steps}
        return None

    def begin(self, engine: EditEngine, host: MegatronHost, pieces: RankPieces) -> None:
        """Start the engine, from the checkpoint if one was loaded.

        Args:
            engine: not started yet.
            pieces: this rank's pieces of the outer state.
        """
        place, resume, choice = self._world.placement, self._resume, self._choice
        reserve_memory(engine, self._world)
        consumed = host.arguments.consumed_train_samples if resume is None else resume.plan.consumed
        check_stages(host.arguments, host.arguments.data_parallel_size, consumed)
        if choice is not None:
            check_on_all_ranks(self._world, "load/fits", lambda: self._check(engine, host, choice))
            if (flag := parameters_only(host.arguments)) and place.global_rank == 0:
                say(dropped_state(choice, flag))
        if resume is None:
            share = share_of(consumed, place.replica, place.num_replicas)
            host.counters.resume(share, consumed, IN_ORDER)
            engine.start(self._step)
            return
        manifest, plan = resume.manifest, resume.plan
        entry = plan.entries[place.replica]
        host.counters.resume(entry.samples, plan.consumed, plan.order)
        host.common_steps = manifest.common_steps
        if entry.is_waiting:
            host.counters.set_pending_schedule(entry.pending_schedule)
        if manifest.is_warmup:
            if manifest.choice is not None and engine.settings.given.auto:  # of the final phase
                engine.use(AutoChoice.from_json(manifest.choice), is_resumed=True)
            residuals = self._gradient_residuals(engine, host, pieces, resume)
            engine.start(entry.step, manifest.round, residuals)
        else:
            self._load_engine(engine, host, pieces.outer, resume)
            if engine.settings.assigns_blocks:
                _override_loop(engine, host, plan)
        if not host.arguments.no_load_rng and _has_same_stages(manifest, host.arguments):
            load_streams(resume.path / EDIT / RANDOM, place.replica % manifest.num_replicas)
        if place.global_rank == 0:
            say(summary_of(resume.choice, manifest, plan, place.num_replicas))
            if (changes := changed_settings(manifest, self.config)) is not None:
                say(changes)

    def _check(self, engine: EditEngine, host: MegatronHost, choice: Choice) -> None:
        """Check that this run's settings are compatible with the checkpoint."""
        resume, args = self._resume, host.arguments
        if resume is not None:
            manifest, plan = resume.manifest, resume.plan
            settings = replace(engine.settings, given=as_chosen(self.config, manifest))
            check_schedule(choice.path, manifest, plan, settings.schedule)
            check_samples(choice.path, plan, args)
            check_pending(choice.path, manifest, plan, settings)
            check_rounds(choice.path, manifest, plan, settings)
        is_common = resume is None or resume.manifest.is_warmup
        is_assigned = engine.settings.assigns_blocks and not host.progress().begins_final_phase
        if is_assigned and is_common:
            step = self._step if resume is None else resume.plan.entries[0].step
            check_equal_steps(choice.path, step, args)

    # ---- Megatron's part

    def _resume_from(
        self, choice: Choice | None, args: Namespace, call: Call[Loaded]
    ) -> _Resume | None:
        """Plan the resume; None where only parameters are loaded, or there is no manifest."""
        if choice is None or parameters_only(args) or choice.manifest is None:
            return None
        replicas = self._world.placement.num_replicas
        self.config = as_saved(self.config, choice.manifest)
        config = as_chosen(self.config, choice.manifest)
        iterations = last_local_iteration(args, config.averaged_fraction)
        run = resuming_run(config, replicas, args, iterations)
        plan = checked_plan(choice.path, choice.manifest, run, config.warmup_steps)
        assert choice.iteration is not None, "only a checkpoint of stock Megatron has no number"
        return _Resume(choice, choice.iteration, choice.manifest, plan, call)

    def _source(self, manifest: Manifest) -> int:
        """Return the saved replica whose Megatron checkpoint this replica loads."""
        return self._world.placement.replica % manifest.num_replicas if manifest.form == ALL else 0

    def _load_stock(self, call: Call[Loaded]) -> Loaded:
        """Load a checkpoint of stock Megatron, if any: every replica loads the same."""
        choice = self._choice
        if (
            choice is None
            or choice.iteration is None
            or not (choice.path / STOCK_METADATA).exists()
        ):
            return call_megatron_load(
                call.proceed, None if choice is None else choice.path, self._world
            )
        return self._load_from(choice.path, choice.iteration, call)

    def _load_replica(self, resume: _Resume, replica: int) -> Loaded:
        from megatron.training import get_args

        folder = replica_folder(resume.path, replica)
        loaded = self._load_from(folder, resume.iteration, resume.load)
        if resume.plan.iteration is not None:  # Megatron set the replica's own count
            get_args().consumed_train_samples = resume.plan.consumed
        return loaded

    def _load_from(self, folder: Path, iteration: int, call: Call[Loaded]) -> Loaded:
        from megatron.training import get_args

        args = get_args()
        step, args.ckpt_step = args.ckpt_step, iteration  # the tracker may name another one
        # If Megatron found no tracker in the folder, it would load this one instead.
        pretrained, args.pretrained_checkpoint = args.pretrained_checkpoint, None
        try:
            with self._redirection.to(folder), new_rates_kept(call, args):
                return call_megatron_load(call.proceed, folder, self._world)
        finally:
            args.ckpt_step, args.pretrained_checkpoint = step, pretrained

    # ---- the plugin's part

    def _load_engine(
        self,
        engine: EditEngine,
        host: MegatronHost,
        pieces: Sequence[LocalPiece],
        resume: _Resume,
    ) -> None:
        """Restore the engine in local training; a round that cannot continue is completed first.

        Collective: all ranks of all replicas.
        """
        manifest, plan, where = resume.manifest, resume.plan, self._world.placement
        saved = rounds_as_saved(resume.path, manifest, host.plan.names)
        if engine.settings.given.auto and saved.choice is not None:
            engine.use(saved.choice, is_resumed=True)
        wire = engine.settings.in_checkpoints(engine.settings.wire)
        shards = RankShards(where.replica, where.num_replicas, wire, host.plan, pieces)

        def load(replica: int) -> list[PendingState]:
            self._load_replica(resume, replica)
            host.counters.set_schedule(max(entry.schedule_position for entry in manifest.replicas))
            return load_pending(resume.path, manifest, replica, shards)

        def start_round() -> None:
            # With --override-opt_param-scheduler Megatron may set it to the consumed samples.
            own = plan.entries[where.replica if plan.continues else 0]
            if not (plan.continues and own.is_waiting):  # these are ahead of their position
                host.counters.set_schedule(own.schedule_position)
            if self.config.inner_state == RESET and not (manifest.is_mid_round and plan.continues):
                host.reset_moments()

        unfinished = None
        if manifest.is_mid_round and not plan.continues:
            inner = torch.tensor([[entry.inner_steps] for entry in manifest.replicas])
            steps = saved.unit_steps + inner
            unfinished = SavedRound(load, steps, self._source(manifest), start_round)
        else:
            start_round()
        engine.load_state_dict(_state_of(resume, saved, shards), unfinished)

    def _gradient_residuals(
        self, engine: EditEngine, host: MegatronHost, pieces: RankPieces, resume: _Resume
    ) -> Sequence[Residual]:
        """Load the error-feedback residuals of averaged gradients; empty lets them begin at zero.

        Collective: all ranks of the replica.
        """
        wire = engine.settings.in_checkpoints(engine.settings.gradient_wire)
        manifest, where = resume.manifest, self._world.placement
        if has_gradient_residuals(manifest, wire, where.num_replicas):
            mine = RankShards(where.replica, where.num_replicas, wire, host.plan, pieces.gradients)
            numels = [shard.numel() for shard in host.gradient_shards()]
            return load_gradients(resume.path, mine, numels)
        if wire.has_residual and wire.name == manifest.gradient_wire and where.global_rank == 0:
            say("another number of replicas: error feedback of averaged gradients begins at zero")
        return ()


def rounds_as_saved(path: Path, manifest: Manifest, units: tuple[str, ...]) -> RoundState:
    """Return the saved state of the rounds, of the replicas that saved it.

    Args:
        units: of this run; the columns of all tables.

    Raises:
        UsageError: it is of another model, or damaged.
    """
    if set(units) != set(manifest.units):
        raise UsageError(
            f"--load {path}",
            f"has the units {', '.join(manifest.units)}, this model has {', '.join(units)}",
            "load a checkpoint of this model",
        )
    columns = [manifest.units.index(unit) for unit in units]
    try:
        saved = round_state(manifest, manifest.num_replicas)
        detectors, steps = saved.detectors.of_units(columns), saved.unit_steps[:, columns]
    except (KeyError, TypeError, ValueError, IndexError, ValidationError) as error:
        rule = f"the state of the rounds is broken: {to_one_line(str(error))}"
        raise UsageError(str(path), rule, REMEDY) from error
    return dataclasses.replace(saved, detectors=detectors, unit_steps=steps)


def _rounds_of(saved: RoundState, resume: _Resume, shards: RankShards) -> RoundState:
    """Return the state of the rounds for the replicas of this run."""
    plan, num_replicas = resume.plan, shards.num_replicas
    rounds = dataclasses.replace(
        saved,
        length=plan.entries[shards.replica].round_length,
        assignment=plan.assignment,
        resumes_at_meeting=plan.resumes_at_meeting,
    )
    if plan.continues:
        return rounds
    history = saved.loss_history
    if len(history.mean) != num_replicas:
        history = LossHistory.fresh(num_replicas)
    # A round that is not finished is completed first.
    return RoundState(
        saved.count + resume.manifest.is_mid_round,
        saved.detectors,
        torch.zeros(num_replicas, saved.unit_steps.shape[1], dtype=torch.int64),
        history,
        length=rounds.length,
        assignment=rounds.assignment,
        resumes_at_meeting=rounds.resumes_at_meeting,
        choice=rounds.choice,
    )


def _state_of(resume: _Resume, saved: RoundState, shards: RankShards) -> EngineState:
    """Build the engine's state for this replica from a checkpoint."""
    manifest, plan, path = resume.manifest, resume.plan, resume.path
    entry = plan.entries[shards.replica]
    outer, pending = load_outer(path, manifest, entry.pending if plan.continues else (), shards)
    return EngineState(
        replica=entry,
        rounds=_rounds_of(saved, resume, shards),
        is_warmup=False,
        outer=outer,
        pending=pending,
        round_seconds=manifest.round_seconds,
        suppressed_until_step=plan.suppressed_until_step,
        is_at_sync=not plan.continues or not manifest.is_mid_round,
    )


def _override_loop(engine: EditEngine, host: MegatronHost, plan: ResumePlan) -> None:
    """Override the intervals of Megatron's loop, as since the last sync."""
    since = sum(entry.inner_steps for entry in plan.entries) * host.counters.samples_per_step
    assignment = engine.status.assignment
    assert assignment is not None, "timed rounds without a ledger"
    is_over = assignment.is_over and not engine.settings.has_final_phase
    host.counters.loop.override_intervals(plan.consumed - since, is_over=is_over)


def _has_same_stages(manifest: Manifest, args: Namespace) -> bool:
    """Return whether random streams can be restored: with the same TP and PP, as in Megatron."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    layout = layout_of(args)
    return all(manifest.parallel.get(size) == layout[size] for size in sizes)


def resuming_run(
    config: EditConfig, num_replicas: int, args: Namespace, iterations: int
) -> ResumingRun:
    """Return the properties of a run that a resume depends on.

    Args:
        num_replicas: N.
        args: Megatron's, validated.
        iterations: before the final synchronous phase.
    """
    return ResumingRun(
        num_replicas=num_replicas,
        is_timed=STRATEGIES[config.strategy].is_timed or config.hub is not None,
        batch=args.global_batch_size,
        chunk=args.micro_batch_size * (args.data_parallel_size // num_replicas),
        target=iterations * args.global_batch_size,
    )


def as_saved(config: EditConfig, manifest: Manifest) -> EditConfig:
    """The settings with what a checkpoint from the rounds determines: the warm-up, where W was not
    given and the training may be longer now; and what this run would choose, where the saved one
    has chosen nothing. With a hub a replica that joins sees no checkpoint."""
    if manifest.is_warmup or manifest.choice is not None or config.hub is not None:
        return config
    names = ["warmup_steps"] if config.has_open_warmup else []
    if config.auto:
        names += [*config.open_settings, "scale_beta2", "warmup_dtype"]
    usual = {"scale_beta2": False, "warmup_dtype": FP32}
    values: dict[str, Any] = {
        name: manifest.settings.get(name, usual.get(name, getattr(config, name))) for name in names
    }
    if "warmup_steps" in values:
        values["warmup_steps"] = min(values["warmup_steps"], config.warmup_steps)
    return replace(config, auto=False, auto_share=Settings.auto_share, **values)


def as_chosen(config: EditConfig, manifest: Manifest) -> EditConfig:
    """The settings with the choice of a checkpoint, if it has one."""
    if manifest.choice is None or not config.auto:
        return config
    try:
        return with_choice(config, AutoChoice.from_json(manifest.choice))
    except (KeyError, TypeError) as error:
        raise UsageError("--load", f"its choice of settings is broken: {error}", REMEDY) from error


def checked_plan(path: Path, manifest: Manifest, run: ResumingRun, warmup_steps: int) -> ResumePlan:
    """Plan how `run` resumes from the checkpoint at `path`.

    Raises:
        UsageError: it cannot.
    """
    try:
        return plan_resume(manifest, run, warmup_steps)
    except ValueError as error:
        remedy = f"train longer, lower {flag('final_sync_fraction')}, or load another one"
        raise UsageError(f"--load {path}", str(error), remedy) from error


# ---- Messages about a resume


def training_settings(config: EditConfig) -> dict[str, object]:
    """Return the settings that affect the numbers of a training, for a manifest."""
    settings = dataclasses.asdict(config)
    return {name: value for name, value in settings.items() if name not in DEPLOYMENT}


def changed_settings(manifest: Manifest, config: EditConfig) -> str | None:
    """Return one line with the settings changed since the checkpoint; None if there are none.

    Args:
        manifest: of the checkpoint; older versions wrote only strategy and wire type.
    """
    before = {"strategy": manifest.strategy, "sync_dtype": manifest.wire, **manifest.settings}
    if manifest.choice is not None and not config.auto:
        chosen = manifest.choice["settings"]
        before |= {n: chosen[n] for n in auto_settings(manifest.strategy) if n in chosen}
    now = training_settings(config)
    changes = [
        f"{flag(name)} {format_value(value)} -> {format_value(now[name])}"
        for name, value in before.items()
        if name in now and value != now[name]
    ]
    return f"settings changed since the checkpoint: {', '.join(changes)}" if changes else None


def summary_of(choice: Choice, manifest: Manifest, plan: ResumePlan, num_replicas: int) -> str:
    """Return one line: the checkpoint, the round, the replicas, and the consumed samples."""
    if manifest.is_warmup:
        where = "in the final synchronous phase" if manifest.is_final_phase else "in warm-up"
    elif manifest.is_mid_round:
        where = f"in round {manifest.round + 1}"
        where += "" if plan.continues else ", which is completed"
    else:
        where = f"after the sync of round {manifest.round}"
    change = (
        f"{num_replicas} replicas"
        if manifest.num_replicas == num_replicas
        else f"{manifest.num_replicas} replicas become {num_replicas}"
    )
    return f"resuming from {choice.path}, {where}: {change}, {plan.consumed} samples consumed"


def dropped_state(choice: Choice, flag_given: str) -> str:
    """Return one line about what a load of the parameters alone leaves out.

    Args:
        flag_given: `--finetune` or `--no-load-optim`.
    """
    manifest = choice.manifest
    text = f"{flag_given}: of {choice.path} only the parameters are loaded"
    if manifest is None or manifest.is_warmup:
        return text
    steps = sum(entry.inner_steps for entry in manifest.replicas[1:])
    dropped = f"; {steps} steps of the others since the last sync are dropped" if steps else ""
    return f"{text}, those of replica 0{dropped}"


# ---- The memory of the rounds, taken before training: a lack of it is found at the start


def reserve_memory(engine: EditEngine, world: ReplicaWorld) -> None:
    """Allocate what the rounds need beside the model, before the warm-up or a load.

    Collective: all ranks of all replicas.

    Raises:
        UsageError: some rank has too little memory; on every rank.
    """

    def reserve() -> None:
        try:
            engine.reserve_memory()
        except RuntimeError as error:  # also torch.OutOfMemoryError
            nbytes = engine.status.state_bytes_per_rank
            raise UsageError(
                f"about {nbytes / 1e9:.3g} GB per rank for anchor, outer momentum and syncs",
                f"must fit beside the model ({str(error).partition('. ')[0]})",
                f"use more ranks per replica, or {flag('offload')}",
            ) from error

    check_on_all_ranks(world, "memory", reserve, what="memory")
