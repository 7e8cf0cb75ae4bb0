"""The unhealthy lines in docs/monitoring.md, compared with what a sync prints.

tests/system/test_docs.py compares the healthy ones with a run.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megatron_edit.method.loss_check import LossVerdict
from megatron_edit.observe.console import PREFIX
from megatron_edit.observe.metrics import loss_rejections, sync_summary
from tests.harness.launch import REPOSITORY
from tests.harness.quotes import quotes, shape_of
from tests.pure.test_event_log import report

PAGE = REPOSITORY / "docs" / "monitoring.md"


def test_unhealthy_lines_are_those_of_the_reports() -> None:
    """Would catch a quoted line whose format is outdated."""
    verdict = LossVerdict(
        torch.tensor([False, True]), torch.tensor([3.0, 9.0]), torch.tensor([0.5, 60.0])
    )
    bad = report(decision=replace(report().decision, loss=verdict))
    printed = [f"{PREFIX} {text}" for text in (sync_summary(bad), *loss_rejections(bad))]
    for name in ("one replica decides", "bad data", "an uneven replica, a slow link"):
        (line,) = quotes(PAGE, name)
        assert any(shape_of(line).fullmatch(each) for each in printed), line


@pytest.mark.parametrize(
    ("printed", "matches"),
    [
        ("[edit] sync 2 after step 30 | clip: 0.5 | x", True),
        (" [edit] sync 12 after step  1 | clip: 1.00E+02 | any | x", True),
        ("[edit] sync two after step 30 | clip: 0.5 | x", False),
        ("[edit] sync 2 after step 30 | clip: 0.5", False),
        ("edit sync 2 after step 30 | clip: 0.5 | x", False),
    ],
)
def test_shape_ignores_numbers_and_blanks(printed: str, matches: bool) -> None:
    """Would catch a comparison that accepts any line, or none of another run."""
    shape = shape_of("[edit] sync 1 after step 20 | clip: 1.00 | ... x")
    assert bool(shape.fullmatch(printed)) == matches
