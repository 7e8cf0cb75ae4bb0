"""Checkpoints that a run cannot go on from, refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.refusals import check_pending, check_rounds, check_schedule

UNITS = ("embedding", "layer.1", "layer.2", "final")


@pytest.mark.parametrize(
    ("sent", "fragments", "is_refused"),
    [
        ([UNITS], 1, False),
        ([UNITS[::2]], 2, False),
        ([UNITS[::2], UNITS[1::2]], 2, False),
        ([UNITS], 2, True),
        ([UNITS[::2]], 1, True),
        ([UNITS[::2]], 4, True),
    ],
)
def test_rounds_on_their_way_keep_their_groups(
    sent: list[tuple[str, ...]], fragments: int, is_refused: bool
) -> None:
    """CO2 with another --edit-fragments: would catch units that land in the middle of a round."""
    pending = [SimpleNamespace(units=units, due=None, is_stepped=False) for units in sent]
    anything: Any = SimpleNamespace
    manifest = anything(units=UNITS, strategy="co2", replicas=[anything(pending=pending)])
    settings = anything(
        schedule=anything(fragments=fragments), landing=anything(at_next_meeting=True)
    )
    plan = anything(goes_on=True)
    if not is_refused:
        check_pending(Path("saves"), manifest, plan, settings)
        return
    with pytest.raises(UsageError, match=f"--edit-fragments {fragments}"):
        check_pending(Path("saves"), manifest, plan, settings)


@pytest.mark.parametrize("was_varying", [False, True])
@pytest.mark.parametrize("is_varying", [False, True])
@pytest.mark.parametrize("steps", [(9, 9), (9, 11)])
def test_a_round_keeps_its_kind_of_length(
    steps: tuple[int, ...], was_varying: bool, is_varying: bool
) -> None:
    """Would catch replicas that meet at different steps, or lists of losses of different length."""
    anything: Any = SimpleNamespace
    entries = [
        anything(step=step, losses=(2.0, 1.0), last_loss_step=0 if was_varying else step)
        for step in steps
    ]
    manifest, plan = anything(replicas=entries), anything(goes_on=True)
    settings = anything(timed=None, schedule=anything(has_fixed_rounds=not is_varying))
    if len(set(steps)) == 1 or was_varying == is_varying:
        check_rounds(Path("saves"), manifest, plan, settings)
        return
    with pytest.raises(UsageError, match="another --edit-interval"):
        check_rounds(Path("saves"), manifest, plan, settings)


@pytest.mark.parametrize(
    ("warmup", "is_refused"), [(0, False), (8, False), (9, True), (None, True)]
)
def test_replicas_that_parted_do_not_warm_up(warmup: int | None, is_refused: bool) -> None:
    """They would share gradients, each with its own parameters. In warm-up anything goes."""
    anything: Any = SimpleNamespace
    plan = anything(entries=[anything(step=8), anything(step=11)])
    schedule = anything(warmup_steps=warmup)
    check_schedule(Path("saves"), anything(is_warmup=True), plan, schedule)
    if not is_refused:
        check_schedule(Path("saves"), anything(is_warmup=False), plan, schedule)
        return
    with pytest.raises(UsageError, match="have parted"):
        check_schedule(Path("saves"), anything(is_warmup=False), plan, schedule)
