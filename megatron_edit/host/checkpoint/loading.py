"""Loading: Megatron loads each replica's own checkpoint; what is beside it follows.

Megatron's call comes while the model is built, before there is an engine. What a checkpoint holds
beyond Megatron's is brought back once the engine is there.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from megatron_edit.checkpoint.folder import EDIT, RANDOM, STOCK_MARK, replica_folder
from megatron_edit.checkpoint.manifest import ALL, Manifest
from megatron_edit.checkpoint.resume import ResumePlan, Run, plan_resume
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.engine.engine import EditEngine
from megatron_edit.engine.pending import bring_back
from megatron_edit.engine.rounds.completion import Completion
from megatron_edit.engine.standing import Standing, load_state_dict
from megatron_edit.engine.sync.inflight import InflightSync
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.choosing import Choice, check_together, choose
from megatron_edit.host.checkpoint.fingerprint import layout_of
from megatron_edit.host.checkpoint.guard import guarded
from megatron_edit.host.checkpoint.outer import Piece
from megatron_edit.host.checkpoint.paths import Redirection
from megatron_edit.host.checkpoint.random import load_streams
from megatron_edit.host.checkpoint.refusals import (
    check_equal_steps,
    check_pending,
    check_rounds,
    check_samples,
    check_schedule,
)
from megatron_edit.host.checkpoint.replica_local import land_saved, load_state
from megatron_edit.host.checkpoint.summary import summary_of
from megatron_edit.host.checkpoint.tables import detectors_of, saved_steps_of, unit_steps_of
from megatron_edit.host.model import MegatronHost
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.order import IN_ORDER, share_of
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.observe.console import say


class LoadControl:
    """Wraps Megatron's `load_checkpoint`.

    Args:
        config: settings.
        world: this process's place, and the store.
        redirection: of the folders that Megatron reads from.
    """

    def __init__(self, config: EditConfig, world: ReplicaWorld, redirection: Redirection) -> None:
        self._config = config
        self._world = world
        self._redirection = redirection
        self._choice: Choice | None = None
        self._plan: ResumePlan | None = None
        self._load: Callable[[], Any] | None = None
        self._step = 0  # at which a run without a manifest starts

    def around_load(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `load_checkpoint`."""
        signature = inspect.signature(load)

        @wraps(load)
        def loaded(*args: Any, **kwargs: Any) -> Any:
            from megatron.training import get_args

            given = signature.bind(*args, **kwargs)
            self._load = lambda: load(*given.args, **given.kwargs)
            megatron = get_args()
            self._choice = choose(self._world, megatron) if megatron.load else None
            manifest = self._manifest(megatron)
            if manifest is None:
                self._step, flops = self._load_stock()
                return self._step, flops
            warmup = self._config.warmup_steps
            self._plan = _planned(manifest, self._run(megatron), warmup, self._choice)
            iteration, flops = self._load_replica(self._source(manifest))
            planned = self._plan.iteration
            return iteration if planned is None else planned, flops

        return loaded

    def begin(
        self, engine: EditEngine, host: MegatronHost, pieces: Callable[[], Sequence[Piece]]
    ) -> None:
        """Start the engine, or let it go on where the checkpoint was written.

        Args:
            engine: not started yet.
            host: its host.
            pieces: what this rank holds of the outer state.
        """
        place, plan, choice = self._world.placement, self._plan, self._choice
        if choice is not None:
            check_together(self._world, "load/fits", lambda: self._check(engine, host, choice))
        if plan is None or choice is None or choice.manifest is None:
            consumed = host.arguments.consumed_train_samples
            host.resume(share_of(consumed, place.replica, place.num_replicas), IN_ORDER)
            engine.start(self._step)
            return
        manifest = choice.manifest
        entry = plan.entries[place.replica]
        host.resume(entry.samples, plan.order)
        if entry.is_waiting:
            host.hold_back(entry.pending_schedule)
        if manifest.is_warmup:
            engine.start(entry.step)
        else:
            load_state_dict(engine, self._standing(engine, host, pieces(), manifest, plan))
            if engine.settings.timed is not None:
                self._take_loop(engine, host, manifest, plan)
        if not host.arguments.no_load_rng and _has_same_stages(manifest, host.arguments):
            load_streams(choice.path / EDIT / RANDOM, place.replica % manifest.num_replicas)
        if place.global_rank == 0:
            say(summary_of(choice, manifest, plan, place.num_replicas))

    def _check(self, engine: EditEngine, host: MegatronHost, choice: Choice) -> None:
        """Whether this run's settings go with the checkpoint."""
        plan, manifest, args = self._plan, choice.manifest, host.arguments
        if plan is not None and manifest is not None:
            check_schedule(choice.path, manifest, plan, engine.settings.schedule)
            check_samples(choice.path, plan, args)
            check_pending(choice.path, manifest, plan, engine.settings)
            check_rounds(choice.path, manifest, plan, engine.settings)
        if engine.settings.timed is not None and (
            plan is None or manifest is None or manifest.is_warmup
        ):
            step = self._step if plan is None else plan.entries[0].step
            check_equal_steps(choice.path, step, args)

    # ---- Megatron's part

    def _manifest(self, args: Namespace) -> Manifest | None:
        """The manifest to go on from; None where only parameters are wanted, or there is none."""
        if self._choice is None or args.finetune or args.no_load_optim:
            return None
        return self._choice.manifest

    def _source(self, manifest: Manifest) -> int:
        """The saved replica whose Megatron checkpoint this replica loads."""
        return self._world.placement.replica % manifest.num_replicas if manifest.form == ALL else 0

    def _load_stock(self) -> Any:
        """A checkpoint of Megatron alone, or none at all: every replica loads the same."""
        choice = self._choice
        assert self._load is not None
        if choice is None or choice.iteration is None or not (choice.path / STOCK_MARK).exists():
            return guarded(self._load, None if choice is None else choice.path, self._world)
        return self._load_from(choice.path, choice.iteration)

    def _load_replica(self, replica: int) -> Any:
        from megatron.training import get_args

        choice, plan = self._choice, self._plan
        assert choice is not None and choice.iteration is not None and plan is not None
        loaded = self._load_from(replica_folder(choice.path, replica), choice.iteration)
        if plan.iteration is not None:
            get_args().consumed_train_samples = plan.consumed  # Megatron took the replica's own
        return loaded

    def _load_from(self, folder: Path, iteration: int) -> Any:
        from megatron.training import get_args

        assert self._load is not None
        args, load = get_args(), self._load
        step, args.ckpt_step = args.ckpt_step, iteration  # the tracker may name another one
        # Where Megatron sees no tracker in the folder, it would take this one instead.
        pretrained, args.pretrained_checkpoint = args.pretrained_checkpoint, None
        try:
            with self._redirection.to(folder):
                return guarded(load, folder, self._world)
        finally:
            args.ckpt_step, args.pretrained_checkpoint = step, pretrained

    # ---- our part

    def _run(self, args: Namespace) -> Run:
        replicas = self._world.placement.num_replicas
        return Run(
            num_replicas=replicas,
            is_timed=STRATEGIES[self._config.strategy].is_timed,
            batch=args.global_batch_size,
            chunk=args.micro_batch_size * (args.data_parallel_size // replicas),
            target=args.train_iters * args.global_batch_size,
        )

    def _standing(
        self,
        engine: EditEngine,
        host: MegatronHost,
        pieces: Sequence[Piece],
        manifest: Manifest,
        plan: ResumePlan,
    ) -> Standing:
        assert self._choice is not None
        state = engine.rounds.new_state()
        runs: list[InflightSync] = []
        if plan.goes_on:
            entry = plan.entries[self._world.placement.replica]
            runs = [bring_back(engine, pending, state) for pending in entry.pending]
        load_state(self._choice.path, manifest, engine, pieces, state, runs)
        detectors = detectors_of(self._choice.path, manifest, host.plan.names)
        rounds = manifest.round
        if manifest.is_mid_round and not plan.goes_on:
            detectors = self._complete(engine, host, manifest, state, detectors, pieces)
            rounds += 1
        if not plan.goes_on:
            host.set_schedule(plan.entries[0].schedule_position)
        if self._config.inner_state == "reset" and not (manifest.is_mid_round and plan.goes_on):
            host.reset_moments()
        return Standing(
            entry=plan.entries[self._world.placement.replica],
            round=rounds,
            detectors=detectors.for_replicas(self._world.placement.num_replicas),
            state=state,
            unit_steps=unit_steps_of(manifest, engine, is_same=plan.goes_on),
            pending=runs,
            replicas_identical=manifest.is_level or not plan.goes_on,
            is_at_sync=not plan.goes_on or not manifest.is_mid_round,
            dealing=plan.dealing,
            quiet_until=plan.quiet_until,
            round_seconds=manifest.round_seconds,
            is_rejoined=plan.is_rejoined,
        )

    def _complete(
        self,
        engine: EditEngine,
        host: MegatronHost,
        manifest: Manifest,
        state: OuterState,
        detectors: DetectorState,
        pieces: Sequence[Piece],
    ) -> DetectorState:
        choice = self._choice
        assert choice is not None
        furthest = max(entry.schedule_position for entry in manifest.replicas)

        def load(replica: int) -> None:
            self._load_replica(replica)
            host.set_schedule(furthest)  # the outer step may ask for the learning rate
            land_saved(choice.path, manifest, replica, engine, pieces, state)

        with torch.no_grad():
            return Completion(
                settings=engine.settings,
                host=host,
                groups=engine.groups,
                state=state,
                load=load,
                steps=saved_steps_of(manifest, engine),
                own=self._source(manifest),
            ).run(detectors)

    def _take_loop(
        self, engine: EditEngine, host: MegatronHost, manifest: Manifest, plan: ResumePlan
    ) -> None:
        """Megatron's loop in our hands again, as it was since the last sync."""
        since = sum(entry.inner_steps for entry in plan.entries) * host.samples_per_step
        assert engine.trigger.dealing is not None
        host.loop.take(plan.consumed - since, is_over=engine.trigger.dealing.is_over)


def _has_same_stages(manifest: Manifest, args: Namespace) -> bool:
    """Whether random streams fit: like Megatron, with the same tensor and pipeline parallelism."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
    layout = layout_of(args)
    return all(manifest.parallel.get(size) == layout[size] for size in sizes)


def _planned(manifest: Manifest, run: Run, warmup_steps: int, choice: Choice | None) -> ResumePlan:
    try:
        return plan_resume(manifest, run, warmup_steps)
    except ValueError as error:
        path = "" if choice is None else f" {choice.path}"
        raise UsageError(
            f"--load{path}", str(error), "train longer, or load another one"
        ) from error
