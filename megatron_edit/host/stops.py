"""Early ends of training: a signal or time limit on any replica, or two failed saves in a row.

Megatron decides at every step boundary for its own world, one replica. Its decision is announced to
the other replicas, and each stops at its next step boundary. `--exit-interval` needs no
announcement: all replicas reach it together.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Mapping
from typing import NoReturn

from megatron_edit.engine import EditEngine
from megatron_edit.host.checkpoint.saving import SaveControl
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.seams.patching import Call
from megatron_edit.observe.console import say


class StopControl:
    """Handles Megatron's decision to exit.

    Args:
        engine: announces and reports requests to stop.
        saves: handles Megatron's saves.
        progress: progress of all replicas.
        is_first: whether this is global rank 0, which prints messages.
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
        """Handle `checkpoint_and_decide_exit`; return whether to exit."""
        if not self._engine.status.is_stopping:
            with self._progress.with_global_counts(call):
                exits = self._decide(call)
            if exits is not None:
                return exits
        # Entered again: a meeting may have updated the counts of the other replicas.
        with self._progress.with_global_counts(call):
            self._save_all(call.arguments)
        return True

    def _decide(self, call: Call[bool]) -> bool | None:
        """Return Megatron's decision; None to stop at once because a replica was asked to."""
        from megatron.training import get_args

        engine, megatron, iteration = self._engine, get_args(), call.arguments["iteration"]
        is_suppressed = engine.status.suppresses_joint_actions
        is_planned = _is_planned(megatron, iteration) and not is_suppressed
        if is_planned and not engine.status.is_warmup and not engine.meet_without_sync():
            return None  # a replica stopped before it reached this meeting
        with self._saves.exit_decision(
            iteration, is_planned=is_planned, is_suppressed=is_suppressed
        ):
            # Also called after an announcement, so that all replicas make the same saves.
            wants_exit = call.proceed()
        if is_planned:
            return True
        if iteration >= megatron.train_iters:
            return False  # all replicas reach this end together
        if wants_exit and not self._has_announced:
            self._announce()
        elif self._saves.should_end_training and not self._has_given_up:
            # Known only on this rank, which stops when the other ranks of its replica do.
            self._has_given_up = True
            engine.announce_stop()
        return None if self._stop_if_requested() else False

    def exit_before_training(self, arguments: Mapping[str, object]) -> NoReturn:
        """Save the resumed state again and exit: a stop was requested before the first step.

        Args:
            arguments: arguments of Megatron's `train`.
        """
        import megatron.training.training as training

        megatron = training.get_args()
        counts = {"iteration": megatron.iteration,
                  "num_floating_point_operations_so_far":
                  megatron.num_floating_point_operations_so_far}  # fmt: skip
        with self._saves.final_save():
            _save({**arguments, **counts})
        training.maybe_finalize_async_save(blocking=True, terminate=True)
        raise SystemExit(0)

    def _announce(self) -> None:
        self._has_announced = True
        self._engine.announce_stop()

    def _stop_if_requested(self) -> bool:
        """Stop if requested; return whether. In warm-up all replicas stop after the same step."""
        engine = self._engine
        if engine.status.is_warmup or not (self._has_announced or engine.status.is_stop_seen):
            return engine.status.is_stopping
        engine.stop_mid_round()
        if self._is_first:
            reason = "as a replica was asked to"
            if self._has_given_up:
                reason = "as two checkpoints in a row could not be written"
            say(f"stopping after iteration {self._progress.iteration}, {reason}")
        return True

    def _save_all(self, arguments: Mapping[str, object]) -> None:
        """Save the state of every replica, regardless of the policy: this is the last save."""
        with self._saves.final_save():
            _save(arguments)


def save_after_training(arguments: Mapping[str, object], iteration: int, flops: float) -> None:
    """Save after Megatron's loop, on every replica.

    Args:
        arguments: arguments of Megatron's `train`.
        iteration: last iteration, as returned by `train`.
        flops: floating-point operations so far, as returned by `train`.
    """
    ends = {"iteration": iteration, "num_floating_point_operations_so_far": flops}
    _save({**arguments, **ends})


def _save(arguments: Mapping[str, object]) -> None:
    """Call Megatron's `save_checkpoint_and_time` with those of the arguments that it accepts."""
    import megatron.training.training as training

    if training.get_args().save:
        accepted = inspect.signature(training.save_checkpoint_and_time).parameters
        training.save_checkpoint_and_time(
            **{name: arguments[name] for name in accepted if name in arguments}
        )


def _is_planned(args: Namespace, iteration: int) -> bool:
    """Whether Megatron exits at this iteration because of a flag."""
    named = getattr(args, "phase_transition_iterations", None) or ()
    return bool(args.exit_interval and iteration % args.exit_interval == 0) or iteration in named
