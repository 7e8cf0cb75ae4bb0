"""Checkpoints that a run cannot go on from, refused before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.refusals import check_pending

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
