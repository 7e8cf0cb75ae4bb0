"""Losses that a checkpoint carries, where rounds of fixed length follow varying ones or reverse."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from megatron_edit.engine.state import MeanLoss, StepLosses

QUIET: Any = SimpleNamespace(on_losses=lambda first, losses, samples=0: None)


def test_each_form_comes_back() -> None:
    """Resume in mid-round with the same kind of rounds."""
    steps, again = StepLosses(4), StepLosses(4)
    for step, loss in enumerate((3.0, math.nan, 2.0), start=5):
        steps.note(step, loss)
    again.restore(steps.payload(), steps.last_step)
    assert again.last_step == 7 and str(again.payload()) == str(steps.payload())
    mean, same = MeanLoss(), MeanLoss()
    mean.note(5, 3.0)
    mean.note(6, 2.0)
    same.restore(mean.payload(), mean.last_step)
    assert same.payload() == mean.payload() == (2.0, 3.0, 1.0, 5.0, 2.0)
    older = MeanLoss()
    older.restore((5.0, 2.0), 0)
    assert older.mean() == 2.5


def test_loss_of_who_waited_belongs_to_the_next_round() -> None:
    """Would catch a mean that has a step more than that of a run that nobody stopped."""
    mean, again = MeanLoss(), MeanLoss()
    for step, loss in enumerate((3.0, 2.0, 7.0)):
        mean.note(step, loss)
    again.restore(mean.payload(), 0, is_waiting=True)
    assert again.mean() == 2.5
    records: Any = [SimpleNamespace(losses=(5.0, 2.0), step=3, samples=1)] * 2
    again.report(records, QUIET)
    again.begin_phase()
    assert again.mean() == again.forget() == 7.0 and math.isnan(again.mean())


def test_varying_rounds_take_over_what_fixed_ones_left() -> None:
    """Would catch two losses that are taken for a sum and a count."""
    mean = MeanLoss()
    mean.restore((3.0, 2.0), last_step=6)
    assert mean.payload()[-2:] == (5.0, 2.0)
    mean.restore((), last_step=0)
    assert mean.payload()[-2:] == (5.0, 2.0)


def test_fixed_rounds_cannot_tell_a_mean() -> None:
    """Would catch a sum and a count that are reported as losses of two steps."""
    steps = StepLosses(4)
    steps.restore((5.0, 2.0), last_step=0)
    assert steps.payload() == ()


def test_each_step_has_its_mean() -> None:
    """Over the replicas that know it; unknown where none does. Catches losses under the steps next
    to their own, and those that are reported twice."""
    told: list[tuple[int, list[float]]] = []
    reporter: Any = SimpleNamespace(on_losses=lambda first, losses: told.append((first, losses)))
    mine = StepLosses(4)
    for step, loss in ((7, 1.0), (8, math.nan), (9, math.nan)):
        mine.note(step, loss)
    other = (3.0, 5.0, math.nan)
    records: Any = [SimpleNamespace(losses=losses) for losses in (mine.payload(), other)]
    mine.report(records, reporter)
    ((first, means),) = told
    assert first == 7 and means[:2] == [2.0, 5.0] and math.isnan(means[2])
    assert mine.payload() == ()
