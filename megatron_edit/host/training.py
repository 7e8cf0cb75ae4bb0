"""The training loop with an engine inside: which of Megatron's calls lead to which of ours.

| Megatron's call | what we add |
|---|---|
| `pretrain` | the replica's own store |
| `setup_model_and_optimizer` | the engine; equal start; the step and gradient hooks |
| `config.finalize_model_grads_func` | warm-up: average the gradient shards over the replicas |
| `optimizer.step` (instance) | count the step; sync when a round ends |
| `training_log` | event files; the loss for the next meeting |
| `evaluate` | mean over the replicas |
| `checkpoint_and_decide_exit` | an end from outside reaches all replicas |
| `save_checkpoint`, `load_checkpoint` | each replica's part; what is beside Megatron's own |
| `schedule_async_save` | outer state is written together with Megatron's own |
| `build_pretraining_data_loader` | A-EDiT: samples as the ledger deals them |
| `train` | at its end, the losses that no meeting has carried |
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial, wraps

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig, warning_of_phases
from megatron_edit.constants import OVERLAP
from megatron_edit.engine import TIED_EMBEDDING, EditEngine, EngineGroups
from megatron_edit.errors import SyncProtocolError, outcome_of
from megatron_edit.host.arguments import resolve_sync_mode
from megatron_edit.host.checkpoint.choosing import check_together
from megatron_edit.host.checkpoint.loading import LoadControl
from megatron_edit.host.checkpoint.outer import LocalPiece, pieces_of
from megatron_edit.host.checkpoint.paths import Redirection
from megatron_edit.host.checkpoint.saving import SaveControl
from megatron_edit.host.checkpoint.write_errors import WriteErrors
from megatron_edit.host.checkpoint.writing import CheckpointWriter
from megatron_edit.host.assigned_data import AssignedLoader, assigned_loader
from megatron_edit.host.files import check_data, looks_for_its_host
from megatron_edit.host.groups import build_groups
from megatron_edit.host.metrics import write_run_header
from megatron_edit.host.model.ends import reason_of_end
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.observe import (
    Observer,
    with_own_world_size,
    with_progress_log_optional,
)
from megatron_edit.host.overlap import keep_sends_asynchronous, land_before_gathers
from megatron_edit.host.seams.calls import Call, answered_by
from megatron_edit.host.seams.megatron import (
    DdpChunk,
    ModelConfig,
    OptimizerOfLoop,
    ParamScheduler,
    StepResult,
)
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.host.settings import engine_settings
from megatron_edit.host.stops import StopControl, save_at_the_end
from megatron_edit.host.timers import EditTimers
from megatron_edit.host.writers import SafeWriter, guard_writers
from megatron_edit.observe.console import say
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.records import Ending

# What Megatron's `setup_model_and_optimizer` returns.
type Built = tuple[Sequence[DdpChunk], OptimizerOfLoop, ParamScheduler]


@dataclass(frozen=True)
class TrainingRun:
    """What there is from the moment that Megatron has built the model.

    Attributes:
        engine: of this rank.
        host: of the engine.
        observer: of logs and evaluations.
        writer: of checkpoints.
        saves: when and in which form it writes.
        stops: ends from outside.
        progress: of all replicas.
    """

    engine: EditEngine
    host: MegatronHost
    observer: Observer
    writer: CheckpointWriter
    saves: SaveControl
    stops: StopControl
    progress: RunProgress


class TrainingLoop:
    """Carries the engine through one run of Megatron's training loop.

    Args:
        config: settings.
        world: this process's place among the replicas.
        events: where news go.
        device: of the parameters.
        patcher: for hooks on instances.
    """

    def __init__(
        self,
        config: EditConfig,
        world: ReplicaWorld,
        events: EventLog,
        device: torch.device,
        patcher: Patcher,
    ) -> None:
        self._config = config
        self._world = world
        self._events = events
        self._device = device
        self._patcher = patcher
        self._redirection = Redirection()
        self._write_errors = WriteErrors()
        self._loads = LoadControl(config, world, self._redirection)
        self._run: TrainingRun | None = None
        self._stop_reason: str | None = None
        self._writers: list[SafeWriter] = []
        self._provider: object = None  # of data sets
        self._cleanup = ExitStack()
        self._cleanup.callback(self._tell_of_writers)
        self._cleanup.callback(events.close)

    @property
    def engine(self) -> EditEngine | None:
        """None until the model is built."""
        return None if self._run is None else self._run.engine

    def attach(self) -> None:
        """Wrap Megatron's training loop."""
        import megatron.training as package
        import megatron.training.checkpointing as checkpointing
        import megatron.training.training as training

        self._redirection.attach(self._patcher)
        self._write_errors.attach(self._patcher)
        wrapped_pretrain = answered_by(self._pretrain)(training.pretrain)
        for module in (package, training):
            self._patcher.replace(module, "pretrain", wrapped_pretrain)
        for name, around in (
            ("setup_model_and_optimizer", answered_by(self._set_up)),
            ("train", answered_by(self._train)),
            ("training_log", self._in_run(lambda run, call: run.observer.log(call))),
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
            ("save_checkpoint", answered_by(self._save)),
            ("load_checkpoint", answered_by(self._loads.load)),
            ("build_pretraining_data_loader", self._in_run(self._deal)),
        ):
            self._patcher.wrap(training, name, around)
        schedule = self._in_run(lambda run, call: run.writer.schedule(call))
        self._patcher.wrap(checkpointing, "schedule_async_save", schedule)
        for module in (training, checkpointing):
            self._patcher.wrap(module, "append_to_progress_log", with_progress_log_optional)

    def release(self) -> None:
        """Hand Megatron's objects back and close the event files."""
        self._cleanup.close()

    def end(self, error: BaseException | None) -> None:
        """Note for the event files how the script ended.

        Args:
            error: that ends this process; None where it is to exit with 0.
        """
        if self._run is None:
            return
        code, reason = outcome_of(error)
        end = "failed" if code else "finished" if self._stop_reason is None else "stopped"
        step, samples = self._run.engine.status.step, self._run.host.samples
        self._events.on_end(Ending(end, reason or self._stop_reason, code, step, samples))

    # ---- wrapped calls

    def _in_run[R](
        self, answer: Callable[[TrainingRun, Call[R]], R]
    ) -> Callable[[Callable[..., R]], Callable[..., R]]:
        """For calls that are Megatron's own as long as there is no run."""

        def answered(call: Call[R]) -> R:
            return call.proceed() if self._run is None else answer(self._run, call)

        return answered_by(answered)

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
            if looks_for_its_host(self._world):
                check_data(get_args(), self._provider)

        check_together(self._world, "data/checked", check, what="the corpus")

    def _train(self, call: Call[tuple[int, float]]) -> tuple[int, float]:
        run = self._run
        try:
            if run is not None:
                if not run.engine.join_pending_meeting():
                    run.stops.leave_before_training(call.arguments)
                run.host.set_pending_schedule(0)  # no meeting is left that it waits at
                run.engine.clock.pause()  # until the first step
            result = call.proceed()
        except SystemExit as stop:
            if not stop.code:  # --exit-interval: all replicas come here, at the same step
                self._stop_reason = self._reason_of_stop()
                self._finish()
            raise
        self._finish()
        if run is not None and run.progress.is_timed:
            result = run.progress.iteration, result[1]
            # Megatron would ask each replica's own number of steps whether to save.
            save_at_the_end(call.arguments, *result)
        return result

    def _save(self, call: Call[None]) -> None:
        if self._run is None:
            raise SyncProtocolError("a checkpoint is to be saved before training")
        self._run.saves.save(call)

    def _deal(
        self, run: TrainingRun, call: Call[DataLoader[object] | None]
    ) -> DataLoader[object] | AssignedLoader | None:
        return assigned_loader(call, run.engine, run.host, self._world.placement.replica)

    # ---- what they lead to

    def _begin(
        self, model: Sequence[DdpChunk], optimizer: OptimizerOfLoop, scheduler: ParamScheduler
    ) -> None:
        """Build the engine and all that stands on it, and start."""
        from megatron.core.utils import get_model_config, unwrap_model
        from megatron.training import get_args, get_timers

        args = get_args()
        # From here on the number of ranks only appears in logs, which are about the whole job.
        args.world_size = self._world.placement.num_replicas * args.world_size
        mode = resolve_sync_mode(self._config, args)
        groups = build_groups(self._world, self._device, self._config, overlap=mode == OVERLAP)
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
        self._cleanup.callback(host.loop.release)
        if not host.has_tied_stages:
            kept = {name: tie for name, tie in groups.ties.items() if name != TIED_EMBEDDING}
            groups = replace(groups, ties=kept)
        self._warn_of_endless_warmup(args, host.last_local_iteration)
        engine = EditEngine(
            engine_settings(self._config, mode, host.target_blocks, host.last_local_step),
            host,
            groups,
            self._world,
            self._events,
        )
        self._cleanup.callback(engine.close)
        self._writers = guard_writers(self._patcher)
        place = self._world.placement
        progress = RunProgress(engine, host, place.replica, place.num_replicas)
        where = (place, self._device)
        resumed_from = self._loads.resumed_from
        write_run_header(self._events, self._config, *where, progress, resumed_from)
        observer = Observer(self._events, engine, host, progress, get_timers())
        if mode == OVERLAP:
            self._hook_gathers(engine, host, model, groups)
            keep_sends_asynchronous(self._patcher, get_model_config(model[0]), self._device)
        self._hook_step(engine, host, observer, optimizer)
        self._hook_gradients(engine, get_model_config(model[0]))
        unwrapped = unwrap_model(model)
        pieces = cache(partial(pieces_of, host, unwrapped))  # for a load and for all saves
        if args.save:
            pieces()  # a model that cannot be saved is refused now
        self._run = self._run_of(engine, host, progress, observer, pieces)
        self._loads.begin(engine, host, pieces)
        self._events.count_samples(engine.status.step, int(args.consumed_train_samples), host.batch)
        engine.clock.pause()  # until the first step: Megatron builds its data sets before that
        self._events.connect_timers(
            EditTimers(get_timers(), engine.clock, args.timing_log_level, self._patcher)
        )

    def _run_of(
        self,
        engine: EditEngine,
        host: MegatronHost,
        progress: RunProgress,
        observer: Observer,
        pieces: Callable[[], Sequence[LocalPiece]],
    ) -> TrainingRun:
        place = self._world.placement
        is_first = place.global_rank == 0
        writer = CheckpointWriter(
            self._config, self._world, self._redirection, self._write_errors, engine, host, pieces
        )
        policy = self._config.inner_state
        saves = SaveControl(policy, writer, engine, host, progress, is_first=is_first)
        stops = StopControl(engine, saves, progress, is_first=is_first)
        return TrainingRun(engine, host, observer, writer, saves, stops, progress)

    def _warn_of_endless_warmup(self, args: Namespace, last_local: int) -> None:
        text = warning_of_phases(self._config, args.train_iters, last_local)
        if text and self._world.placement.global_rank == 0:
            say(text)

    def _hook_step(
        self,
        engine: EditEngine,
        host: MegatronHost,
        observer: Observer,
        optimizer: OptimizerOfLoop,
    ) -> None:
        """Override `step` and `zero_grad` on the instance that Megatron's loop calls."""

        def around_step(step: Callable[[], StepResult]) -> Callable[[], StepResult]:
            @wraps(step)
            def counted() -> StepResult:
                engine.before_step()
                result = host.attempt_step(step, defers_gather=not engine.status.is_warmup)
                engine.after_step()
                return result

            return counted

        def around_zero[**P](zero_grad: Callable[P, None]) -> Callable[P, None]:
            @wraps(zero_grad)
            def stamped(*args: P.args, **kwargs: P.kwargs) -> None:
                observer.begin_step()  # the first call of Megatron's train_step
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
                "Megatron does not cut later pipeline stages into buckets: their part of a sync "
                "cannot hide behind compute"
            )

    def _hook_gradients(self, engine: EditEngine, model_config: ModelConfig) -> None:
        """Preset the model's finalize hook, which Megatron's loop honours."""
        from megatron.core.distributed import finalize_model_grads

        finalize = model_config.finalize_model_grads_func or finalize_model_grads

        @wraps(finalize)
        def averaging(model: object, num_tokens: Tensor | None = None, **kwargs: object) -> None:
            engine.before_gradients()
            finalize(model, num_tokens, **kwargs)
            engine.average_gradients(num_tokens)

        self._patcher.replace(model_config, "finalize_model_grads_func", averaging)

    def _finish(self) -> None:
        if self._run is not None:
            self._run.engine.finish()
            self._run.host.loop.release()
        self._events.flush()

    def _reason_of_stop(self) -> str:
        """Why Megatron's loop ends early, with exit code 0."""
        from megatron.training import get_args

        if reason := reason_of_end(get_args()):
            return reason
        is_asked = self._run is not None and self._run.engine.status.is_stopping
        return "another replica was asked to stop" if is_asked else "--exit-interval"

    def _tell_of_writers(self) -> None:
        for writer in self._writers:
            writer.tell_of_losses()

    def _finish_saves(self) -> None:
        if self._run is not None:
            self._run.writer.finish()
