"""Ends from outside: a signal or the end of the allotted time, on whichever replica comes first,
or two checkpoints in a row that could not be written.

Megatron decides at every step boundary, for its own world: one replica. Its decision is announced
to the other replicas, and each stops at its own next boundary. `--exit-interval` is no such end:
all replicas come to it together.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Mapping
from typing import NoReturn

from megatron_edit.engine import EditEngine
from megatron_edit.host.checkpoint.saving import SaveControl
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.seams.calls import Call
from megatron_edit.observe.console import say


class StopControl:
    """Answers Megatron's decision to exit.

    Args:
        engine: asked, and told.
        saves: what Megatron's saves become.
        progress: of all replicas.
        is_first: whether this is the first rank of all, which speaks.
    """

    def __init__(
        self, engine: EditEngine, saves: SaveControl, progress: RunProgress, *, is_first: bool
    ) -> None:
        self._engine = engine
        self._saves = saves
        self._progress = progress
        self._is_first = is_first
        self._has_announced = self._has_given_up = False

    def decide(self, call: Call[bool]) -> bool:
        """Megatron's `checkpoint_and_decide_exit`."""
        if not self._engine.status.is_stopping:
            with self._progress.shown(call):
                exits = self._decide(call)
            if exits is not None:
                return exits
        with self._progress.shown(call):  # after a meeting that told more of the other replicas
            self._save_all(call.arguments)
        return True

    def _decide(self, call: Call[bool]) -> bool | None:
        """Megatron's decision; None to end at once because a replica was asked to."""
        from megatron.training import get_args

        engine, megatron, iteration = self._engine, get_args(), call.arguments["iteration"]
        is_suppressed = engine.status.suppresses_joint_actions
        is_planned = _is_planned(megatron, iteration) and not is_suppressed
        if is_planned and not engine.status.is_warmup and not engine.check_in():
            return None  # a replica has been stopped on its way here
        with self._saves.deciding(iteration, is_planned=is_planned, is_suppressed=is_suppressed):
            wants_exit = call.proceed()  # after an announcement, too: all replicas save alike
        if is_planned:
            return True
        if iteration >= megatron.train_iters:
            return False  # all replicas come to this end together
        if wants_exit and not self._has_announced:
            self._announce()
        elif self._saves.gives_up and not self._has_given_up:
            # Known to this rank alone: it stops when the others of its replica know, too.
            self._has_given_up = True
            engine.announce_stop()
        return None if self._obey() else False

    def leave_before_training(self, arguments: Mapping[str, object]) -> NoReturn:
        """A stop has come before the first step after a checkpoint: save that once more, and end.

        Args:
            arguments: of Megatron's `train`.
        """
        import megatron.training.training as training

        megatron = training.get_args()
        counts = {"iteration": megatron.iteration,
                  "num_floating_point_operations_so_far":
                  megatron.num_floating_point_operations_so_far}  # fmt: skip
        with self._saves.ending():
            _save({**arguments, **counts})
        training.maybe_finalize_async_save(blocking=True, terminate=True)
        raise SystemExit(0)

    def _announce(self) -> None:
        self._has_announced = True
        self._engine.announce_stop()

    def _obey(self) -> bool:
        """Whether to stop here. In warm-up replicas stop after the same step, a little later."""
        engine = self._engine
        if engine.status.is_warmup or not (self._has_announced or engine.status.is_stop_seen):
            return engine.status.is_stopping
        engine.leave()
        if self._is_first:
            reason = "as a replica was asked to"
            if self._has_given_up:
                reason = "as two checkpoints in a row could not be written"
            say(f"stopping after iteration {self._progress.iteration}, {reason}")
        return True

    def _save_all(self, arguments: Mapping[str, object]) -> None:
        """Save where each replica stands, whatever the policy: nothing else will be left."""
        with self._saves.ending():
            _save(arguments)


def save_at_the_end(arguments: Mapping[str, object], iteration: int, flops: float) -> None:
    """Save after Megatron's loop, on every replica.

    Args:
        arguments: of Megatron's `train`.
        iteration: what it returned.
        flops: what it returned, too.
    """
    ends = {"iteration": iteration, "num_floating_point_operations_so_far": flops}
    _save({**arguments, **ends})


def _save(arguments: Mapping[str, object]) -> None:
    """Megatron's `save_checkpoint_and_time`, with those of these arguments that it takes."""
    import megatron.training.training as training

    if training.get_args().save:
        wanted = inspect.signature(training.save_checkpoint_and_time).parameters
        training.save_checkpoint_and_time(
            **{name: arguments[name] for name in wanted if name in arguments}
        )


def _is_planned(args: Namespace, iteration: int) -> bool:
    """Whether Megatron exits at an iteration that the user named."""
    named = getattr(args, "phase_transition_iterations", None) or ()
    return bool(args.exit_interval and iteration % args.exit_interval == 0) or iteration in named
