"""What follows an optimizer step, as it is planned before the step."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_edit.engine.rounds.controller import MeetingPlan, StepPlan, SyncController
from megatron_edit.method.landing import DIRECT_COPY, LandingRule

anything: Any = SimpleNamespace
LATE = replace(DIRECT_COPY, delay=2)
NEXT = replace(DIRECT_COPY, keeps_progress=False, at_next_meeting=True)
OLD: Any = anything(name="a sync that has not landed")


def plan_after(
    *,
    rule: LandingRule = DIRECT_COPY,
    meets: bool = True,
    is_last: bool = False,
    due: list[Any] | None = None,
    of_units: list[Any] | None = None,
) -> tuple[StepPlan, list[Any]]:
    """Of step 10, and what was asked on the way."""
    asked: list[Any] = []

    def is_due(step: int, *, is_asked: bool) -> bool:
        asked.append((step, is_asked))
        return meets

    controller = anything(
        state=anything(step=9),
        settings=anything(landing=rule),
        queue=anything(due=lambda step: due if step == 10 and due else [],
                       of_units=lambda units: of_units if units == "units" and of_units else []),
        trigger=anything(is_due=is_due, fragments_after=lambda step: [step], is_last=is_last,
                         ends_rounds=False),
        _fragments=anything(union=lambda fragments: "units" if fragments == [10] else None),
    )  # fmt: skip
    controller.plan_meeting = partial(SyncController.plan_meeting, controller)
    return SyncController.plan_step(controller, is_asked=True), asked


def test_a_step_inside_of_a_round() -> None:
    """Nothing follows but a sync whose time has come: it replaces parameters."""
    assert plan_after(meets=False) == (StepPlan(), [(10, True)])
    plan, _ = plan_after(meets=False, due=[OLD], rule=LATE)
    assert plan == StepPlan(landing=(OLD,), is_landing_due=True)


@pytest.mark.parametrize(
    ("case", "is_landing_due"),
    [
        ({}, True),
        ({"rule": LATE}, False),
        ({"rule": LATE, "is_last": True}, True),
        ({"rule": LATE, "of_units": [OLD]}, True),
        ({"rule": LATE, "due": [OLD]}, True),
        ({"rule": NEXT}, True),
    ],
)  # fmt: skip
def test_a_step_before_a_meeting(case: dict[str, Any], is_landing_due: bool) -> None:
    """Parameters are replaced by what lands at once, by what the same units began before, and at
    the end; not by a sync that only begins. Catches a gather of parameters that nobody replaces,
    and one that is left out."""
    plan, _ = plan_after(**case)
    meeting: Any = MeetingPlan("units", case.get("is_last", False))  # type: ignore[arg-type]
    assert plan.meeting == meeting and plan.is_landing_due is is_landing_due
    assert plan.landing == tuple(case.get("due", ())) and not plan.is_warmup
