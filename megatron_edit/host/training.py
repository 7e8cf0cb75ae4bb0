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
| `build_pretraining_data_loader` | A-EDiT: samples as the ledger deals them |
| `train` | at its end, the losses that no meeting has carried |
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor

from megatron_edit.comm.wire import Wire
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig, warning_of_endless_warmup
from megatron_edit.engine import TIED_EMBEDDING, EditEngine, EngineGroups
from megatron_edit.host.arguments import resolve_sync_mode
from megatron_edit.host.checkpoint.loading import LoadControl
from megatron_edit.host.checkpoint.outer import pieces_of
from megatron_edit.host.checkpoint.paths import Redirection
from megatron_edit.host.checkpoint.saving import SaveControl
from megatron_edit.host.checkpoint.writing import CheckpointWriter
from megatron_edit.host.dealing import deal_samples
from megatron_edit.host.groups import build_groups
from megatron_edit.host.metrics import tell_of_the_run
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.observe import Observer
from megatron_edit.host.overlap import land_before_gathers
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.host.settings import engine_settings
from megatron_edit.host.stops import StopControl, save_at_the_end
from megatron_edit.host.timers import EditTimers
from megatron_edit.method.order import SampleOrder
from megatron_edit.observe.console import say
from megatron_edit.observe.events import EventLog


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
        self._observer = Observer(events)
        self.engine: EditEngine | None = None
        self.host: MegatronHost | None = None

    def attach(self) -> None:
        """Wrap Megatron's training loop."""
        import megatron.training as package
        import megatron.training.training as training

        redirection = Redirection(self._patcher)
        self._writer = CheckpointWriter(self._config, self._world, redirection, self._patcher)
        policy, place = self._config.inner_state, self._world.placement
        is_first = place.global_rank == 0
        self._saves = SaveControl(policy, self._writer, place.num_replicas, is_first=is_first)
        self._loads = LoadControl(self._config, self._world, redirection)
        self._stops = StopControl(self._saves, is_first=is_first)
        wrapped_pretrain = self._around_pretrain(training.pretrain)
        for module in (package, training):
            self._patcher.replace(module, "pretrain", wrapped_pretrain)
        for name, around in (
            ("setup_model_and_optimizer", self._around_setup),
            ("train", self._around_train),
            ("training_log", self._observer.around_log),
            ("get_start_time_from_progress_log", self._observer.around_progress),
            ("evaluate", self._observer.around_evaluate),
            ("evaluate_and_print_results", self._observer.around_evaluation_report),
            ("checkpoint_and_decide_exit", self._stops.around_decision),
            ("save_checkpoint", self._saves.around_save),
            ("load_checkpoint", self._loads.around_load),
        ):
            self._patcher.wrap(training, name, around)
        replica = self._world.placement.replica
        deal_samples(self._patcher, self._built, replica, self._order, training.get_args)

    def release(self) -> None:
        """Hand Megatron's objects back and close the event files."""
        if self.engine is not None:
            self.engine.close()
        if self.host is not None:
            self.host.loop.release()
            self.host.release()
        self._events.close()

    # ---- wrapped calls

    def _around_pretrain(self, pretrain: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(pretrain)

        @wraps(pretrain)
        def with_store(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            if given.arguments.get("store") is None:
                given.arguments["store"] = self._world.replica_store
            try:
                result = pretrain(*given.args, **given.kwargs)
            except SystemExit as stop:
                if not stop.code:
                    self._writer.finish()
                raise
            self._writer.finish()
            return result

        return with_store

    def _around_setup(self, setup: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(setup)
        def with_engine(*args: Any, **kwargs: Any) -> Any:
            self._build_engine(*(built := setup(*args, **kwargs)))
            return built

        return with_engine

    def _around_train(self, train: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(train)

        @wraps(train)
        def to_the_end(*args: Any, **kwargs: Any) -> Any:
            try:
                given = signature.bind(*args, **kwargs)
                if self.engine is not None and self.host is not None:
                    if not self.engine.catch_up():
                        self._stops.leave_before_training(given.arguments)
                    self.host.hold_back(0)  # no meeting is left that it waits at
                    self.engine.clock.pause()  # until the first step
                result = train(*args, **kwargs)
            except SystemExit as stop:
                if not stop.code:  # --exit-interval: all replicas come here, at the same step
                    self._finish()
                raise
            self._finish()
            if self.engine is not None and self.engine.settings.timed is not None:
                # Megatron would ask each replica's own number of steps whether to save.
                save_at_the_end(given.arguments, *result)
            return result

        return to_the_end

    # ---- what they lead to

    def _build_engine(self, model: Sequence[Any], optimizer: Any, scheduler: Any) -> None:
        from megatron.core.utils import get_model_config, unwrap_model
        from megatron.training import get_args, get_timers

        args = get_args()
        # From here on the number of ranks only appears in logs, which are about the whole job.
        args.world_size = self._world.placement.num_replicas * args.world_size
        groups = build_groups(self._world, self._device, Wire.of(self._config.sync_dtype))
        self.host = MegatronHost(
            args, model, optimizer, scheduler, groups.replica, self._world.placement
        )
        if not self.host.has_tied_stages:
            kept = {name: tie for name, tie in groups.ties.items() if name != TIED_EMBEDDING}
            groups = replace(groups, ties=kept)
        self._warn_of_endless_warmup(args)
        mode = resolve_sync_mode(self._config, args)
        self.engine = EditEngine(
            engine_settings(self._config, mode, self.host.target_blocks),
            self.host,
            groups,
            self._world,
            self._events,
        )
        self._observer.engine, self._observer.host = self.engine, self.host
        self._stops.engine = self.engine
        where = (self._world.placement, self._device)
        tell_of_the_run(self._events, self._config, *where, self.engine, self.host, mode)
        if mode == "overlap":
            self._hook_gathers(model, groups)
        self._hook_step(optimizer)
        self._hook_gradients(get_model_config(model[0]))
        unwrapped = unwrap_model(model)
        pieces = cache(partial(pieces_of, self.host, unwrapped))  # for a load and for all saves
        if args.save:
            pieces()  # a model that cannot be saved is refused now
        self._writer.use(self.engine, self.host, pieces)
        self._saves.use(self.engine, self.host)
        self._loads.begin(self.engine, self.host, pieces)
        clock = self.engine.clock
        clock.pause()  # until the first step: Megatron builds its data sets before that
        self._events.timers = EditTimers(get_timers(), clock, args.timing_log_level, self._patcher)

    def _warn_of_endless_warmup(self, args: Any) -> None:
        text = warning_of_endless_warmup(self._config, args.train_iters)
        if text and self._world.placement.global_rank == 0:
            say(text)

    def _hook_step(self, optimizer: Any) -> None:
        """Override `step` and `zero_grad` on the instance that Megatron's loop calls."""
        engine, host = self.engine, self.host
        assert engine is not None and host is not None

        def around_step(step: Callable[[], Any]) -> Callable[[], Any]:
            @wraps(step)
            def counted() -> Any:
                engine.before_step()
                host.loop.begin_step()
                host.defer_gather(engine.is_landing_due)
                result = step()
                host.defer_gather(False)
                host.count_step(was_applied=bool(result[0]))
                engine.after_step()
                return result

            return counted

        def around_zero(zero_grad: Callable[..., None]) -> Callable[..., None]:
            @wraps(zero_grad)
            def stamped(*args: Any, **kwargs: Any) -> None:
                self._observer.begin_step()  # the first call of Megatron's train_step
                zero_grad(*args, **kwargs)

            return stamped

        self._patcher.wrap(optimizer, "step", around_step)
        self._patcher.wrap(optimizer, "zero_grad", around_zero)

    def _hook_gathers(self, model: Sequence[Any], groups: EngineGroups) -> None:
        assert self.engine is not None and self.host is not None
        plan, unit_of = self.host.plan, self.host.unit_of
        can_hide = land_before_gathers(self._patcher, model, self.engine, plan, unit_of)
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

    def _hook_gradients(self, model_config: Any) -> None:
        """Preset the model's finalize hook, which Megatron's loop honours."""
        from megatron.core.distributed import finalize_model_grads

        finalize = model_config.finalize_model_grads_func or finalize_model_grads

        @wraps(finalize)
        def averaging(model: Any, num_tokens: Tensor | None = None, **kwargs: Any) -> None:
            assert self.engine is not None
            self.engine.before_gradients()
            finalize(model, num_tokens, **kwargs)
            self.engine.average_gradients(num_tokens)

        self._patcher.replace(model_config, "finalize_model_grads_func", averaging)

    def _built(self) -> EditEngine:
        assert self.engine is not None
        return self.engine

    def _order(self) -> SampleOrder:
        assert self.host is not None
        return self.host.order

    def _finish(self) -> None:
        if self.engine is not None and self.host is not None:
            self.engine.finish()
            self.host.loop.release()
        self._events.flush()
