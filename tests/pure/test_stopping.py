"""Megatron's decision to exit, and its effect on other replicas. Megatron does not run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import megatron
import pytest

from megatron_edit.host.stops import StopControl

anything: Any = SimpleNamespace


class Replica:
    """Records calls in `done`; Megatron decides to exit where `wants_exit`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **status: Any) -> None:
        self.done: list[Any] = []
        self.wants_exit = False
        self.args = anything(save="saves", exit_interval=None, train_iters=100)
        self.engine = anything(
            announce_stop=lambda: self.done.append("announce"), stop_mid_round=self._leave,
            meet_without_sync=lambda: True,
            status=anything(**{
                "step": 7, "suppresses_joint_actions": False, "is_warmup": False,
                "is_stopping": False, "is_stop_seen": False, **status,
            }),
        )  # fmt: skip
        self.saves: Any = anything(
            exit_decision=self._deciding, final_save=self._ending, should_end_training=False
        )
        progress: Any = anything(with_global_counts=lambda call: nullcontext())
        self.control = StopControl(self.engine, self.saves, progress, is_first=False)
        package: Any = anything(get_args=lambda: self.args)
        package.training = anything(
            get_args=package.get_args, save_checkpoint_and_time=self._save_checkpoint_and_time
        )
        # `import a.b.c as x` reads attributes of packages that an earlier test has imported.
        monkeypatch.setattr(megatron, "training", package, raising=False)
        monkeypatch.setitem(sys.modules, "megatron.training", package)
        monkeypatch.setitem(sys.modules, "megatron.training.training", package.training)

    def decide(self, iteration: int) -> bool:
        """Whether this replica ends after an iteration."""
        arguments = {"model": "model", "iteration": iteration}
        return self.control.decide(anything(arguments=arguments, proceed=lambda: self.wants_exit))

    def _leave(self) -> None:
        self.done.append("leave")
        self.engine.status.is_stopping = True

    @contextmanager
    def _deciding(self, iteration: int, *, is_planned: bool, is_suppressed: bool) -> Iterator[None]:
        self.done.append(("planned" if is_planned else "decide", iteration))
        yield

    @contextmanager
    def _ending(self) -> Iterator[None]:
        self.done.append("ending")
        yield

    def _save_checkpoint_and_time(self, iteration: int, model: str) -> None:
        self.done.append(("save", iteration, model))


SAVED = ["ending", ("save", 8, "model")]


def test_stop_in_a_round_is_announced_and_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a replica that stops without an announcement, or without a save."""
    replica = Replica(monkeypatch)
    assert replica.decide(7) is False and replica.done == [("decide", 7)]
    replica.wants_exit = True
    assert replica.decide(8) is True
    assert replica.done[1:] == [("decide", 8), "announce", "leave", *SAVED]


def test_other_replicas_stop_at_their_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not announce it again. Without --save nothing is saved."""
    replica = Replica(monkeypatch, is_stop_seen=True)
    assert replica.decide(8) is True
    assert replica.done == [("decide", 8), "leave", *SAVED]
    silent = Replica(monkeypatch, is_stop_seen=True)
    silent.args.save = None
    assert silent.decide(8) is True and silent.done == [("decide", 8), "leave", "ending"]


def test_failing_saves_stop_all_ranks_of_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank finds that saves have failed: it announces a stop once, and stops when all ranks of
    its replica have seen it. Catches a rank that stops before the others."""
    replica = Replica(monkeypatch)
    replica.saves.should_end_training = True
    assert replica.decide(6) is False and replica.decide(7) is False
    assert replica.done == [("decide", 6), "announce", ("decide", 7)]
    replica.engine.status.is_stop_seen = True
    assert replica.decide(8) is True and replica.done[4:] == ["leave", *SAVED]


def test_stop_in_warm_up_waits_for_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announced once, and followed when all replicas have agreed. Catches a replica that stops
    alone, and a stop that is not announced."""
    replica = Replica(monkeypatch, is_warmup=True)
    replica.wants_exit = True
    assert replica.decide(6) is False and replica.decide(7) is False
    assert replica.done == [("decide", 6), "announce", ("decide", 7)]
    replica.engine.status.is_stopping = True
    assert replica.decide(8) is True and replica.done[3:] == SAVED


def test_planned_exit_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """All replicas reach it together; where one has stopped before it, the others stop likewise."""
    replica = Replica(monkeypatch)
    replica.args.exit_interval, replica.wants_exit = 4, True
    assert replica.decide(8) is True and replica.done == [("planned", 8)]
    stopped = Replica(monkeypatch)
    stopped.engine.meet_without_sync = lambda: False
    stopped.args.exit_interval = 4
    assert stopped.decide(8) is True and stopped.done == SAVED
    last = Replica(monkeypatch)
    last.wants_exit = True
    assert last.decide(100) is False and last.done == [("decide", 100)]
