"""Losses in a checkpoint, also if it is resumed with another kind of rounds (fixed or varying)."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_edit.engine.state import MeanLoss, StepLosses

SILENT_REPORTER: Any = SimpleNamespace(on_losses=lambda first, losses, samples=0: None)


def test_losses_round_trip_through_checkpoint() -> None:
    """Resume in the middle of a round with the same kind of rounds."""
    steps, again = StepLosses(4), StepLosses(4)
    for step, loss in enumerate((3.0, math.nan, 2.0), start=5):
        steps.note(step, loss)
    again.restore(steps.payload(), steps.last_step)
    assert again.last_step == 7 and str(again.payload()) == str(steps.payload())
    mean, same = MeanLoss(), MeanLoss()
    mean.note(5, 3.0)
    mean.note(6, 2.0)
    same.restore(mean.payload(), mean.last_step)
    assert same.payload() == mean.payload()
    assert mean.payload()[:5] == (2.0, 3.0, 1.0, 5.0, 2.0)
    older = MeanLoss()
    older.restore((5.0, 2.0), 0)
    assert older.mean() == 2.5


def test_loss_of_waiting_replica_belongs_to_next_round() -> None:
    """Would catch a mean with one step more than in a run without interruption."""
    mean, again = MeanLoss(), MeanLoss()
    for step, loss in enumerate((3.0, 2.0, 7.0)):
        mean.note(step, loss)
    again.restore(mean.payload(), 0, is_waiting=True)
    assert again.mean() == 2.5
    records: Any = [SimpleNamespace(losses=(5.0, 2.0), step=3, samples=1)] * 2
    again.report(records, SILENT_REPORTER, 2)
    again.begin_phase()
    assert again.mean() == again.forget() == 7.0 and math.isnan(again.mean())


def test_varying_rounds_resume_losses_of_fixed_rounds() -> None:
    """Would catch two losses that are read as a sum and a count."""
    mean = MeanLoss()
    mean.restore((3.0, 2.0), last_step=6)
    assert mean.payload()[3:5] == (5.0, 2.0)
    mean.restore((), last_step=0)
    assert mean.payload()[3:5] == (5.0, 2.0)


def test_fixed_rounds_discard_saved_mean() -> None:
    """Would catch a sum and a count that are read as losses of two steps."""
    steps = StepLosses(4)
    steps.restore((5.0, 2.0), last_step=0)
    assert steps.payload() == ()


def test_step_losses_are_averaged_over_replicas() -> None:
    """Over the replicas that have the loss; NaN if none has it.

    Catches losses reported for neighbouring steps, or twice.
    """
    reported: list[tuple[int, list[float]]] = []
    reporter: Any = SimpleNamespace(
        on_losses=lambda first, losses: reported.append((first, losses))
    )
    mine = StepLosses(4)
    for step, loss in ((7, 1.0), (8, math.nan), (9, math.nan)):
        mine.note(step, loss)
    other = (3.0, 5.0, math.nan)
    records: Any = [SimpleNamespace(losses=losses) for losses in (mine.payload(), other)]
    mine.report(records, reporter, 0)
    ((first, means),) = reported
    assert first == 7 and means[:2] == [2.0, 5.0] and math.isnan(means[2])
    assert mine.payload() == ()


@pytest.mark.parametrize("resumed_after", [None, 2, 3, 4, 6])
def test_round_has_the_losses_of_its_own_steps(resumed_after: int | None) -> None:
    """Of rounds that end after steps 3 and 5, each loss known after its meeting; with a resume
    between any two steps. Would catch a round's last loss in the next line, or in one of its own,
    and a line that a resume loses."""
    reported: list[tuple[int, list[float], int]] = []
    reporter: Any = SimpleNamespace(on_losses=lambda *found: reported.append(found))
    mine = MeanLoss()
    for step in range(1, 7):
        if step - 1 == resumed_after:
            saved, mine = mine.payload(), MeanLoss()
            mine.restore(saved, 0)
        if step in (3, 5, 6):  # the last one is the end of training
            losses = mine.payload()[-mine.capacity :]
            records: Any = [SimpleNamespace(losses=x, step=step) for x in (losses, (0.0, 0.0))]
            mine.report(records, reporter, 8 * step)
        mine.note(step, float(step))
    assert reported == [(3, [2.0], 24), (5, [4.5], 40)]
