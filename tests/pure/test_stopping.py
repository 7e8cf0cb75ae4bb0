"""Megatron's decision to exit, and what becomes of it on the other replicas: no Megatron runs."""

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
    """Notes what is done; Megatron wants to exit where `wants_exit`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **status: Any) -> None:
        self.done: list[Any] = []
        self.wants_exit = False
        self.args = anything(save="saves", exit_interval=None, train_iters=100)
        self.engine = anything(
            announce_stop=lambda: self.done.append("announce"), leave=self._leave,
            check_in=lambda: True,
            status=anything(**{
                "step": 7, "suppresses_joint_actions": False, "is_warmup": False,
                "is_stopping": False, "is_stop_seen": False, **status,
            }),
        )  # fmt: skip
        self.saves: Any = anything(deciding=self._deciding, ending=self._ending, gives_up=False)
        progress: Any = anything(shown=lambda call: nullcontext())
        self.control = StopControl(self.engine, self.saves, progress, is_first=False)
        package: Any = anything(get_args=lambda: self.args)
        package.training = anything(
            get_args=package.get_args, save_checkpoint_and_time=self._save_checkpoint_and_time
        )
        # `import a.b.c as x` asks the packages first, where a test before has imported them.
        monkeypatch.setattr(megatron, "training", package, raising=False)
        monkeypatch.setitem(sys.modules, "megatron.training", package)
        monkeypatch.setitem(sys.modules, "megatron.training.training", package.training)

    def decide(self, iteration: int) -> bool:
        """After an iteration: whether this replica ends."""
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


def test_a_stop_is_announced_obeyed_and_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a round: catches a replica that stops without a word, or without what it has."""
    replica = Replica(monkeypatch)
    assert replica.decide(7) is False and replica.done == [("decide", 7)]
    replica.wants_exit = True
    assert replica.decide(8) is True
    assert replica.done[1:] == [("decide", 8), "announce", "leave", *SAVED]


def test_the_others_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    """At their own next step; nobody announces it once more. Without --save nothing is saved."""
    replica = Replica(monkeypatch, is_stop_seen=True)
    assert replica.decide(8) is True
    assert replica.done == [("decide", 8), "leave", *SAVED]
    silent = Replica(monkeypatch, is_stop_seen=True)
    silent.args.save = None
    assert silent.decide(8) is True and silent.done == [("decide", 8), "leave", "ending"]


def test_saves_that_fail_end_the_replica_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one rank knows that saves have failed: it announces that once, and leaves when all ranks
    of its replica have heard of it. Catches one that leaves before the others."""
    replica = Replica(monkeypatch)
    replica.saves.gives_up = True
    assert replica.decide(6) is False and replica.decide(7) is False
    assert replica.done == [("decide", 6), "announce", ("decide", 7)]
    replica.engine.status.is_stop_seen = True
    assert replica.decide(8) is True and replica.done[4:] == ["leave", *SAVED]


def test_in_warm_up_all_stop_after_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Announced once, and obeyed when all have agreed: catches one that leaves alone, and a stop
    that nobody hears of."""
    replica = Replica(monkeypatch, is_warmup=True)
    replica.wants_exit = True
    assert replica.decide(6) is False and replica.decide(7) is False
    assert replica.done == [("decide", 6), "announce", ("decide", 7)]
    replica.engine.status.is_stopping = True
    assert replica.decide(8) is True and replica.done[3:] == SAVED


def test_at_a_planned_exit_all_are_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody announces it; where one has been stopped on its way, the others leave like it."""
    replica = Replica(monkeypatch)
    replica.args.exit_interval, replica.wants_exit = 4, True
    assert replica.decide(8) is True and replica.done == [("planned", 8)]
    broken_off = Replica(monkeypatch)
    broken_off.engine.check_in = lambda: False
    broken_off.args.exit_interval = 4
    assert broken_off.decide(8) is True and broken_off.done == SAVED
    last = Replica(monkeypatch)
    last.wants_exit = True
    assert last.decide(100) is False and last.done == [("decide", 100)]
