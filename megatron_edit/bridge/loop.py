"""Connects the engine to the training loop of Megatron-Bridge.

| Bridge | what is added |
|---|---|
| `initialize_megatron` (in `setup`) | the replica's own store |
| `config.get_data_parallel_size` (instance) | the ranks of all replicas |
| `build_pretraining_data_loader` (in `loaders`) | the replica's share of the samples |
| `build_train_valid_test_datasets` (in `loaders`) | replica 0 builds the index first |
| `config.optimizer.provide` (instance) | an error at the first step without the callback |
| `on_data_init_start` | the engine; equal parameters; hooks of step and gradients |
| `optimizer.step`, `zero_grad` (instance), `finalize_model_grads_func` | as in Megatron's loop |
| `on_train_step_end` | event files; the loss for the next meeting; samples of all replicas |
| `on_eval_start` ... `on_test_end` | the replica's share; mean over the replicas |
| `on_checkpoint_save` | the plugin's part of the checkpoint |
| `on_train_end` | the losses that no meeting has reported |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from megatron_edit.bridge.arguments import ConfigArguments
from megatron_edit.bridge.checkpoints import BridgeLoads, save_state
from megatron_edit.errors import HostVersionError, UsageError
from megatron_edit.host.seams.patching import Call, HookCalls, handled_by
from megatron_edit.host.seams.probes import Probe, check_probes
from megatron_edit.host.training import GRADIENTS, STEP, ZERO_GRAD, TrainingLoop, TrainingRun

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import CallbackContext
    from megatron.bridge.training.config import ConfigContainer


BEGIN, STEP_START, STEP_END = "on_data_init_start", "on_train_step_start", "on_train_step_end"
_HOOKS = (STEP_START, ZERO_GRAD, GRADIENTS, STEP, STEP_END)
_REMEDY = "pass it to Bridge's own loop: pretrain(config, forward_step, callbacks=[edit])"


class BridgeLoop(TrainingLoop):
    """Connects the engine to one run of Megatron-Bridge; arguments as of `TrainingLoop`."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._loads: BridgeLoads = BridgeLoads(self._config, self._world, self._redirection)
        self._calls = HookCalls(
            _HOOKS, (STEP_START, STEP, STEP_END), "Megatron-Bridge's training loop", _REMEDY
        )
        self._bridge: ConfigContainer | None = None
        self._bridge_args: ConfigArguments | None = None
        self._has_ended = False
        self._eval_batch = 0  # samples of an evaluation's step, of all replicas

    def attach(self) -> None:
        """Check and wrap the functions of Megatron-Bridge that have no seam."""
        import megatron.bridge.data.loaders as loaders
        import megatron.bridge.training.initialize as initialize
        import megatron.bridge.training.setup as setup
        import megatron.core.datasets.utils as utils

        check_bridge()
        self._patcher.wrap(setup, "initialize_megatron", handled_by(self._initialize))
        self._patcher.wrap(loaders, "build_pretraining_data_loader", handled_by(self._share))
        self._patcher.wrap(loaders, "build_train_valid_test_datasets", handled_by(self._gate))
        # Bound by name; the attachment wraps the function in its own module.
        self._patcher.replace(initialize, "compile_helpers", lambda: utils.compile_helpers())

    def share_batches(self, config: ConfigContainer) -> None:
        """Let the batch arithmetic of a configuration use the ranks of all replicas."""
        num_replicas, size_of_world = self._num_replicas, config.get_data_parallel_size

        def of_all_replicas(world_size: int) -> int:
            return int(num_replicas * size_of_world(world_size))

        self._patcher.replace(config, "get_data_parallel_size", of_all_replicas)

    def take_config(self, config: ConfigContainer, args: ConfigArguments) -> None:
        """Use a configuration that is checked and complete.

        Args:
            config: that is trained.
        """
        self._bridge, self._bridge_args = config, args

        def provide(**kwargs: Any) -> object:
            from megatron.core.optimizer import get_megatron_optimizer

            if getattr(config, "data_parallel_size", None) is None:  # set by Bridge's `pretrain`
                raise _another_config()
            optimizer = get_megatron_optimizer(config=config.optimizer, **kwargs)
            self._patcher.wrap(optimizer, "step", handled_by(self._first_step))
            return optimizer

        self._patcher.replace(config.optimizer, "provide", provide)

    @property
    def _num_replicas(self) -> int:
        return self._world.placement.num_replicas

    @property
    def _given(self) -> tuple[TrainingRun, ConfigContainer, ConfigArguments]:
        """The run and the configuration, in callbacks."""
        if self._run is None or self._bridge is None or self._bridge_args is None:
            rule = "was not called before the first step, so that EDiT would not train"
            raise UsageError(f"the callback {BEGIN} of EditCallback", rule, _REMEDY)
        return self._run, self._bridge, self._bridge_args

    # ---- wrapped functions

    def _initialize(self, call: Call[object]) -> object:
        call.arguments["restart_store"] = self._world.replica_store
        return call.proceed()

    def _share(self, call: Call[DataLoader[object] | None]) -> DataLoader[object] | None:
        given, replica = call.arguments, self._world.placement.replica
        given["data_parallel_rank"] += replica * given["data_parallel_size"]
        given["data_parallel_size"] *= self._num_replicas
        return call.proceed()

    def _gate(self, call: Call[object]) -> object:
        self._world.wait_for_first_replica("datasets/0")
        built = call.proceed()
        self._world.announce("datasets/0")
        return built

    def _first_step(self, call: Call[object]) -> object:
        _ = self._given  # raises the error of a callback that was not called
        return call.proceed()

    # ---- callbacks

    def begin(self, context: CallbackContext) -> None:
        """Build the engine, and start it."""
        from megatron.training import global_vars

        args, config, state = self._bridge_args, self._bridge, context.state
        if args is None or config is None or state.cfg is not config:
            raise _another_config()
        args.follow(state.train_state)
        args.timing_log_level = config.logger.timing_log_level
        for name, value in (
            ("_GLOBAL_ARGS", args),
            ("_GLOBAL_TIMERS", state.timers),
            ("_GLOBAL_TENSORBOARD_WRITER", state.tensorboard_logger),
            ("_GLOBAL_WANDB_WRITER", state.wandb_logger),
        ):
            self._patcher.replace(global_vars, name, value)
        self._loads.read(config.checkpoint.load, args.iteration)
        self._begin(context.model, context.optimizer, context.scheduler)

    def begin_training(self) -> None:
        """Begin the loop."""
        run, _, _ = self._given
        run.engine.join_pending_meeting()
        run.host.counters.set_pending_schedule(0)  # no meeting is pending now
        run.engine.clock.pause()  # until the first step

    def begin_step(self) -> None:
        """Count the beginning of a step."""
        self._calls.note(STEP_START)

    def end_step(self, context: CallbackContext) -> None:
        """Record a step, and count the samples of the other replicas."""
        self._calls.note(STEP_END)
        run, _, args = self._given
        own = run.host.counters.samples_per_step
        # Bridge adds those of this replica right after this callback.
        context.state.train_state.consumed_train_samples += own * (self._num_replicas - 1)
        args.step_samples = own
        groups = context.optimizer.param_groups
        lr = next((group["lr"] for group in groups if group.get("params")), None)
        run.observer.on_iteration(context.loss_dict or {}, lr, context.grad_norm)
        args.step_samples = 0

    def begin_evaluation(self, split: str) -> None:
        """Wait for the other replicas, and let this one evaluate its share of each batch."""
        run, config, _ = self._given
        run.observer.begin_report(split)
        run.observer.begin_evaluation()
        self._eval_batch = int(config.validation.eval_global_batch_size)
        config.validation.eval_global_batch_size = self._eval_batch // self._num_replicas

    def count_evaluation_batch(self) -> None:
        """Count an evaluated batch as progress."""
        self._given[0].engine.count_evaluation_batch()

    def end_evaluation(self, context: CallbackContext) -> None:
        """Replace the losses by their means over the replicas."""
        run, config, _ = self._given
        config.validation.eval_global_batch_size = self._eval_batch
        others = self._eval_batch - self._eval_batch // self._num_replicas
        context.state.train_state.consumed_valid_samples += others * config.validation.eval_iters
        run.observer.end_evaluation(context.total_loss_dict)

    def save(self, context: CallbackContext) -> None:
        """Add the plugin's part to a checkpoint that Bridge has written."""
        run, config, _ = self._given
        run.engine.clock.pause()  # until the next step
        step, place = int(context.state.train_state.step), self._world.placement
        save_state(config.checkpoint.save, step, self._config, place, run)

    def end_training(self) -> None:
        """Report the remaining syncs and losses."""
        _, _, args = self._given
        self._calls.check_end(args.curr_iteration - args.iteration)
        self._finish()
        self._has_ended = True

    def check_trained(self) -> None:
        """Check at the end of the `with` block that the configuration was trained.

        Raises:
            UsageError: it was not, or a callback was not called.
        """
        if self._run is None:
            rule = "did not train the configuration of EditCallback"
            raise UsageError("the block of EditCallback", rule, _REMEDY)
        if not self._has_ended:  # `train.exit_interval`: Bridge exits without the last callback
            self._stop_reason = "train.exit_interval"
            self.end_training()


def _another_config() -> UsageError:
    return UsageError(
        "the configuration of pretrain",
        "must be the one that EditCallback was made with, not a copy",
        "pass the same object to both",
    )


# ---- Checks that Megatron-Bridge has the symbols that this package uses


SUPPORTED = "0.6."
_TRAINING = "megatron.bridge.training"
PROBES = (
    Probe(f"{_TRAINING}.pretrain", "pretrain", ("config", "forward_step_func", "callbacks")),
    Probe(f"{_TRAINING}.setup", "initialize_megatron", ("restart_store",)),
    Probe(f"{_TRAINING}.initialize", "compile_helpers"),
    Probe(f"{_TRAINING}.config:ConfigContainer", "get_data_parallel_size", ("world_size",)),
    Probe(f"{_TRAINING}.config", "runtime_config_update", ("cfg",)),
    Probe(
        "megatron.bridge.data.loaders",
        "build_pretraining_data_loader",
        ("data_parallel_rank", "data_parallel_size"),
    ),
    Probe("megatron.bridge.data.loaders", "build_train_valid_test_datasets"),
)
EVENTS = (
    "on_data_init_start", "on_train_start", "on_train_step_start", "on_train_step_end",
    "on_train_end", "on_eval_start", "on_eval_step_start", "on_eval_end", "on_test_start",
    "on_test_step_start", "on_test_end", "on_checkpoint_save",
)  # fmt: skip


def check_bridge() -> None:
    """Check the version of Megatron-Bridge, its symbols and its events.

    Raises:
        HostVersionError: it is unsupported, or lacks one of them.
    """
    from megatron.bridge.package_info import __version__ as version
    from megatron.bridge.training.callbacks import VALID_EVENTS

    name = f"megatron-bridge {version}"
    if not str(version).startswith(SUPPORTED):
        raise HostVersionError(
            name, f"only {SUPPORTED}x is supported", "install megatron-bridge 0.6.2"
        )
    check_probes(PROBES)
    for event in EVENTS:
        if event not in VALID_EVENTS:
            raise HostVersionError(name, f"has no callback {event}", "use another version")
