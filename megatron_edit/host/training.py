"""Hooks of Megatron's training loop that call the engine.

| Megatron's call | what the hook adds |
|---|---|
| `pretrain` | the replica's own store |
| `setup_model_and_optimizer` | the engine; equal parameters; hooks of step and gradients |
| `finalize_model_grads` | warm-up: average the gradient shards over the replicas |
| `optimizer.step` (instance) | count the step; sync when a round ends |
| `training_log` | event files; the loss for the next meeting |
| `evaluate` | mean over the replicas |
| `checkpoint_and_decide_exit` | a stop on one replica stops all replicas |
| `save_checkpoint`, `load_checkpoint` | each replica's part; state that Megatron does not save |
| `schedule_async_save` | outer state is written together with Megatron's state |
| `build_pretraining_data_loader` | A-EDiT: samples as assigned by the ledger |
| `train` | at its end, losses that no meeting has reported |
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import wraps

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig, phase_warning
from megatron_edit.constants import MEASURED_STEPS, OVERLAP
from megatron_edit.engine import (
    TIED_EMBEDDING,
    EditEngine,
    ElasticParts,
    EngineGroups,
    EngineSettings,
)
from megatron_edit.errors import INTERRUPTED, SyncProtocolError, outcome_of
from megatron_edit.host.arguments import resolve_sync_mode
from megatron_edit.host.assigned_data import AssignedLoader, assigned_loader, full_loader, split_of
from megatron_edit.host.checkpoint.async_saves import WorkerWatch, WriteErrors
from megatron_edit.host.checkpoint.choosing import check_on_all_ranks
from megatron_edit.host.checkpoint.loading import LoadControl
from megatron_edit.host.checkpoint.outer import RankPieces
from megatron_edit.host.checkpoint.param_groups import patch_param_groups
from megatron_edit.host.checkpoint.paths import Redirection
from megatron_edit.host.checkpoint.saving import SaveControl
from megatron_edit.host.checkpoint.writing import CheckpointWriter
from megatron_edit.host.data import DataParallelView
from megatron_edit.host.elastic import join_hub
from megatron_edit.host.files import check_data, claim_data_check
from megatron_edit.host.groups import build_elastic_groups, build_groups
from megatron_edit.host.log_lines import EditTimers
from megatron_edit.host.metrics import SafeWriter, connect_writers, guard_writers, write_run_header
from megatron_edit.host.model.counters import exit_reason, last_local_iteration
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.observe import (
    Observer,
    with_own_world_size,
    with_progress_log_optional,
)
from megatron_edit.host.overlap import keep_sends_asynchronous, land_before_gathers
from megatron_edit.host.seams.megatron import (
    DdpChunk,
    ModelConfig,
    OptimizerOfLoop,
    ParamScheduler,
    StepResult,
)
from megatron_edit.host.seams.patching import Call, HookCalls, Patcher, handled_by
from megatron_edit.host.stops import StopControl, save_after_training
from megatron_edit.host.telemetry import TelemetryControl
from megatron_edit.observe.console import say
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.records import Ending

# Hooks that every step calls, in this order.
ZERO_GRAD, GRADIENTS = "optimizer.zero_grad", "finalize_model_grads_func"
STEP, LOG = "optimizer.step", "training_log"
HOOKS = (ZERO_GRAD, GRADIENTS, STEP, LOG)
_HOOK_REMEDY = "do not replace functions of Megatron after its model is built"

# What Megatron's `setup_model_and_optimizer` returns.
type Built = tuple[Sequence[DdpChunk], OptimizerOfLoop, ParamScheduler]


@dataclass(frozen=True)
class TrainingRun:
    """Objects that exist once Megatron has built the model.

    Attributes:
        observer: handles logs and evaluations.
        saves: decides when and in which form checkpoints are written.
        progress: progress of all replicas.
    """

    engine: EditEngine
    host: MegatronHost
    observer: Observer
    writer: CheckpointWriter
    saves: SaveControl
    stops: StopControl
    progress: RunProgress


class TrainingLoop:
    """Connects the engine to one run of Megatron's training loop.

    Args:
        world: placement of this process, and the stores.
        telemetry: OpenTelemetry and MLflow.
        patcher: patches Megatron's functions and instances.
    """

    def __init__(
        self,
        config: EditConfig,
        world: ReplicaWorld,
        events: EventLog,
        telemetry: TelemetryControl,
        device: torch.device,
        patcher: Patcher,
    ) -> None:
        self._world = world
        self._events = events
        self._telemetry = telemetry
        self._device = device
        self._patcher = patcher
        self._redirection = Redirection()
        self._write_errors = WriteErrors()
        self._loads = LoadControl(config, world, self._redirection)
        self._run: TrainingRun | None = None
        self._stop_reason: str | None = None
        self._writers: list[SafeWriter] = []
        self._provider: object = None  # data set provider
        self._calls = HookCalls(HOOKS, (STEP, LOG), "Megatron's training loop", _HOOK_REMEDY)
        self._cleanup = ExitStack()
        self._cleanup.callback(telemetry.close)
        self._cleanup.callback(self._report_lost_writes)
        self._cleanup.callback(events.close)

    @property
    def engine(self) -> EditEngine | None:
        """The engine; None until the model is built."""
        return None if self._run is None else self._run.engine

    def use_settings(self, config: EditConfig) -> None:
        """Use settings that are complete, before training begins."""
        self._loads.config = config

    @property
    def _config(self) -> EditConfig:
        return self._loads.config

    def attach(self) -> None:
        """Wrap Megatron's training loop."""
        import megatron.training as package
        import megatron.training.checkpointing as checkpointing
        import megatron.training.training as training

        self._redirection.attach(self._patcher)
        self._write_errors.attach(self._patcher)
        patch_param_groups(self._patcher)
        place = self._world.scope
        WorkerWatch(f"replica {place.replica} rank {place.rank}").attach(self._patcher)
        wrapped_pretrain = handled_by(self._pretrain)(training.pretrain)
        for module in (package, training):
            self._patcher.replace(module, "pretrain", wrapped_pretrain)
        for name, around in (
            ("setup_model_and_optimizer", handled_by(self._set_up)),
            ("train", handled_by(self._train)),
            ("training_log", self._in_run(self._log)),
            ("get_start_time_from_progress_log", with_own_world_size),
            ("evaluate", self._in_run(lambda run, call: run.observer.evaluate(call))),
            (
                "evaluate_and_print_results",
                self._in_run(lambda run, call: run.observer.report_evaluation(call)),
            ),
            (
                "checkpoint_and_decide_exit",
                self._in_run(lambda run, call: run.stops.decide(call)),
            ),
            ("save_checkpoint", handled_by(self._save)),
            ("load_checkpoint", handled_by(self._loads.load)),
            ("build_pretraining_data_loader", self._in_run(self._build_loader)),
        ):
            self._patcher.wrap(training, name, around)
        schedule = self._in_run(lambda run, call: run.writer.schedule(call))
        self._patcher.wrap(checkpointing, "schedule_async_save", schedule)
        for module in (training, checkpointing):
            self._patcher.wrap(module, "append_to_progress_log", with_progress_log_optional)

    def release(self) -> None:
        """Release Megatron's objects and close the event files."""
        self._cleanup.close()

    def end(self, error: BaseException | None) -> None:
        """Record in the event files how the script ended.

        Args:
            error: error that ends this process; None if it exits with 0.
        """
        if self._run is None:
            return
        code, reason = outcome_of(error)
        reason, has_failed = reason or self._stop_reason, code not in (0, INTERRUPTED)
        end = "failed" if has_failed else "finished" if reason is None else "stopped"
        step, samples = self._run.engine.status.step, self._run.host.counters.samples
        self._events.on_end(Ending(end, reason, code, step, samples))

    # ---- wrapped calls

    def _in_run[R](
        self, answer: Callable[[TrainingRun, Call[R]], R]
    ) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """Return a wrapper that calls `answer`, or Megatron's function before there is a run."""

        def answered(call: Call[R]) -> R:
            return call.proceed() if self._run is None else answer(self._run, call)

        return handled_by(answered)

    def _pretrain[R](self, call: Call[R]) -> R:
        self._provider = call.arguments.get("train_valid_test_dataset_provider")
        if call.arguments.get("store") is None:
            call.arguments["store"] = self._world.replica_store
        try:
            result = call.proceed()
        except SystemExit as stop:
            if not stop.code:
                self._finish_saves()
            raise
        self._finish_saves()
        return result

    def _set_up(self, call: Call[Built]) -> Built:
        self._check_data()
        built = call.proceed()
        self._begin(*built)
        return built

    def _check_data(self) -> None:
        from megatron.training import get_args

        def check() -> None:
            if claim_data_check(self._world):
                check_data(get_args(), self._provider)

        check_on_all_ranks(self._world, "data/checked", check, what="the corpus")

    def _train(self, call: Call[tuple[int, float]]) -> tuple[int, float]:
        run = self._run
        try:
            if run is not None:
                if not run.engine.join_pending_meeting():
                    run.stops.exit_before_training(call.arguments)
                run.host.counters.set_pending_schedule(0)  # no meeting is pending now
                run.engine.clock.pause()  # until the first step
                args = run.host.arguments
                start, num_skipped = int(args.iteration), len(args.iterations_to_skip)
            result = call.proceed()
        except SystemExit as stop:
            if not stop.code:  # --exit-interval: all replicas exit here, at the same step
                self._stop_reason = self._reason_of_stop()
                self._finish()
            raise
        if run is not None:
            self._calls.check_end(result[0] - start - num_skipped)
        self._finish()
        if run is not None and run.progress.is_timed:
            result = run.progress.iteration, result[1]
            # Megatron would decide by each replica's own number of steps whether to save.
            save_after_training(call.arguments, *result)
        return result

    def _log[R](self, run: TrainingRun, call: Call[R]) -> R:
        self._calls.note(LOG)
        return run.observer.log(call)

    def _save(self, call: Call[None]) -> None:
        if self._run is None:
            raise SyncProtocolError("a checkpoint is to be saved before training")
        self._run.saves.save(call)

    def _build_loader(
        self, run: TrainingRun, call: Call[DataLoader[object] | None]
    ) -> DataLoader[object] | AssignedLoader | None:
        from megatron.core import parallel_state
        from megatron.core.datasets.utils import Split

        args, dataset = run.host.arguments, call.arguments["dataset"]
        if args.full_validation and split_of(dataset) is Split.valid:
            # Replicas of an elastic run do not share evaluations: each reads the complete set.
            view = DataParallelView(parallel_state, self._world.scope)
            return full_loader(call.proceed(), args, view)
        return assigned_loader(call, run.engine, run.host, self._world.placement.num_replicas)

    # ---- what the hooks do

    def _begin(
        self, model: Sequence[DdpChunk], optimizer: OptimizerOfLoop, scheduler: ParamScheduler
    ) -> None:
        """Build the engine and the objects that use it, load a checkpoint if any, and start."""
        from megatron.core.utils import get_model_config, unwrap_model
        from megatron.training import get_args, get_timers

        args = get_args()
        self._make_room_to_measure()
        # From here on the world size is used only in logs, which are about the whole job.
        args.world_size = self._world.placement.num_replicas * args.world_size
        mode = resolve_sync_mode(self._config, args)
        groups, elastic = self._make_groups(overlap=mode == OVERLAP)
        host = MegatronHost(
            args,
            model,
            optimizer,
            scheduler,
            groups.replica,
            self._world.placement,
            self._config,
        )
        self._cleanup.callback(host.release)
        self._cleanup.callback(host.counters.loop.release)
        if not host.has_tied_stages:
            kept = {name: tie for name, tie in groups.ties.items() if name != TIED_EMBEDDING}
            groups = replace(groups, ties=kept)
        last_local = last_local_iteration(args, self._config.final_sync_fraction)
        self._print_phase_warning(args, last_local)
        engine = EditEngine(
            EngineSettings(
                self._config,
                mode == OVERLAP,
                host.counters.target_blocks,
                host.counters.last_local_step if elastic is None else last_local,
                has_final_phase=host.counters.has_final_phase,
            ),
            host,
            groups,
            self._world,
            self._events,
            elastic=elastic,
        )
        self._cleanup.callback(engine.close)
        if elastic is not None:
            self._events.follow(elastic.membership)
            elastic.membership.on_message = self._events.on_local_message
        self._writers = guard_writers(self._patcher)
        place = self._world.placement
        progress = RunProgress(engine, host, place.replica, place.num_replicas)
        where = (self._world, self._device)
        resumed_from = self._loads.resumed_from
        is_joining = elastic is not None and elastic.is_joining
        run = write_run_header(
            self._events,
            self._config,
            *where,
            progress,
            None if is_joining else resumed_from,
            is_joining=is_joining,
        )
        connect_writers(self._events, progress, run)
        resumes = is_joining or resumed_from is not None
        self._writers += self._telemetry.connect(self._events, progress, run, resumes=resumes)
        observer = Observer(self._events, engine, host, progress, get_timers())
        if mode == OVERLAP:
            self._hook_gathers(engine, host, model, groups)
            keep_sends_asynchronous(self._patcher, get_model_config(model[0]), self._device)
        self._hook_step(engine, host, observer, optimizer)
        self._hook_gradients(engine, get_model_config(model[0]))
        pieces = RankPieces(host, unwrap_model(model))
        if args.save:
            _ = pieces.outer  # refuse a model that cannot be saved before training
        self._run = self._run_of(engine, host, progress, observer, pieces)
        if not is_joining:
            self._loads.begin(engine, host, pieces)
        self._events.count_samples(
            engine.status.step, int(args.consumed_train_samples), host.counters.batch
        )
        engine.clock.pause()  # until the first step: Megatron first builds its data sets
        self._events.connect_timers(
            EditTimers(get_timers(), engine.clock, args.timing_log_level, self._patcher)
        )

    def _make_room_to_measure(self) -> None:
        """Let a warm-up that begins shortly before its end, or after it, go on for as many steps as
        are measured, where settings are chosen."""
        config, step = self._config, self._loads.warmup_step
        if step is None or not config.auto or config.hub is not None:
            return
        least = step + MEASURED_STEPS + 1
        if least > config.warmup_steps:
            self.use_settings(config.with_warmup(least))
            if self._world.placement.global_rank == 0:
                say(f"warm-up until step {least}: links and steps are measured in it")

    def _make_groups(self, *, overlap: bool) -> tuple[EngineGroups, ElasticParts | None]:
        """Return the engine's groups, and the parts of an elastic run if this is one."""
        world, device, config = self._world, self._device, self._config
        if config.hub is None:
            return build_groups(world, device, config, overlap=overlap), None
        start = self._loads.starting_point

        def join(control: Group) -> ElasticParts:
            return join_hub(world, device, config, control, world.layout, start)

        return build_elastic_groups(world, device, join)

    def _run_of(
        self,
        engine: EditEngine,
        host: MegatronHost,
        progress: RunProgress,
        observer: Observer,
        pieces: RankPieces,
    ) -> TrainingRun:
        place = self._world.placement
        is_first = place.global_rank == 0
        writer = CheckpointWriter(
            self._config,
            self._world,
            self._redirection,
            self._write_errors,
            engine,
            host,
            pieces,
        )
        policy = self._config.inner_state
        saves = SaveControl(policy, writer, engine, host, progress, is_first=is_first)
        stops = StopControl(engine, saves, progress, is_first=is_first)
        return TrainingRun(engine, host, observer, writer, saves, stops, progress)

    def _print_phase_warning(self, args: Namespace, last_local: int) -> None:
        text = phase_warning(self._config, args.train_iters, last_local)
        if text and self._world.placement.global_rank == 0:
            say(text)

    def _hook_step(
        self,
        engine: EditEngine,
        host: MegatronHost,
        observer: Observer,
        optimizer: OptimizerOfLoop,
    ) -> None:
        """Override `step` and `zero_grad` on the optimizer that Megatron's loop calls."""

        def around_step(step: Callable[[], StepResult]) -> Callable[[], StepResult]:
            @wraps(step)
            def counted() -> StepResult:
                self._calls.note(STEP)
                engine.before_step()
                result = host.attempt_step(step, defers_gather=not engine.status.is_warmup)
                engine.after_step()
                return result

            return counted

        def around_zero[**P](zero_grad: Callable[P, None]) -> Callable[P, None]:
            @wraps(zero_grad)
            def stamped(*args: P.args, **kwargs: P.kwargs) -> None:
                self._calls.note(ZERO_GRAD)
                observer.begin_step()  # the first call in Megatron's train_step
                zero_grad(*args, **kwargs)

            return stamped

        self._patcher.wrap(optimizer, "step", around_step)
        self._patcher.wrap(optimizer, "zero_grad", around_zero)

    def _hook_gathers(
        self,
        engine: EditEngine,
        host: MegatronHost,
        model: Sequence[DdpChunk],
        groups: EngineGroups,
    ) -> None:
        plan = host.plan
        can_hide = land_before_gathers(self._patcher, model, engine, plan, host.unit_of)
        if self._world.placement.global_rank > 0:
            return
        if not can_hide and len(plan.shards) > 1:
            say(
                "no bucket is gathered before all units of a stage: a sync cannot hide behind "
                "compute; set --ddp-bucket-size to the size of a layer"
            )
        if groups.stage.size < groups.replica.size:
            say(
                "Megatron does not split later pipeline stages into buckets: their part of a sync "
                "cannot hide behind compute"
            )

    def _hook_gradients(self, engine: EditEngine, model_config: ModelConfig) -> None:
        """Average the gradients after Megatron's loop has finalized them.

        The loop calls the function of the model's configuration. Before 0.19 it first sets it to
        the function of its own module.
        """
        import megatron.training.training as training

        def averaging(finalize: Callable[..., None]) -> Callable[..., None]:
            @wraps(finalize)
            def averaged(model: object, num_tokens: Tensor | None = None, **kwargs: object) -> None:
                self._calls.note(GRADIENTS)
                engine.before_gradients()
                finalize(model, num_tokens, **kwargs)
                engine.average_gradients(num_tokens)

            return averaged

        given = model_config.finalize_model_grads_func or training.finalize_model_grads
        self._patcher.replace(model_config, GRADIENTS, averaging(given))
        self._patcher.wrap(training, "finalize_model_grads", averaging)

    def _finish(self) -> None:
        if self._run is not None:
            self._run.engine.finish()
            self._run.host.counters.loop.release()
        self._events.flush()

    def _reason_of_stop(self) -> str:
        """Return why Megatron's loop ended early with exit code 0."""
        from megatron.training import get_args

        if reason := exit_reason(get_args()):
            return reason
        engine = self.engine
        if engine is None or not engine.status.is_stopping:
            return "--exit-interval"
        is_by_hub = engine.elastic is not None and engine.elastic.is_ending
        return "megatron-edit hub stop" if is_by_hub else "another replica was asked to stop"

    def _report_lost_writes(self) -> None:
        for writer in self._writers:
            writer.report_lost_writes()

    def _finish_saves(self) -> None:
        if self._run is not None:
            elastic = self._run.engine.elastic
            with nullcontext() if elastic is None else elastic.membership.working():
                self._run.writer.finish()
            if elastic is not None:
                elastic.leave()
