"""The count of calls of hooks in the first steps of a training."""

from __future__ import annotations

import pytest

from megatron_edit.errors import UsageError
from megatron_edit.host.seams.patching import CHECKED_STEPS, HookCalls

HOOKS = ("first", "second", "third")


def made(*hooks: str) -> HookCalls:
    """Return counts after these calls."""
    calls = HookCalls(HOOKS, ("second", "third"), "the loop", "do something")
    for hook in hooks:
        calls.note(hook)
    return calls


def test_all_calls_in_order_are_accepted() -> None:
    """Would catch an error in a training in which nothing is wrong."""
    calls = made(*HOOKS * 5)
    calls.check_end(5)


@pytest.mark.parametrize("missing", HOOKS)
def test_missing_hook_is_named_before_the_third_step(missing: str) -> None:
    """Would catch a hook that is never called, wherever it is in a step."""
    present = [hook for hook in HOOKS if hook != missing]
    with pytest.raises(UsageError, match=f"the hook {missing}: was not called by the loop in step"):
        made(*present * CHECKED_STEPS)


def test_hook_missing_in_the_second_step_only_is_named() -> None:
    """Would catch a hook that something replaces after the first step."""
    with pytest.raises(UsageError, match="the hook second: was not called by the loop in step 2"):
        made(*HOOKS, "first", "third")


def test_repeated_calls_are_accepted() -> None:
    """A loop may zero gradients twice in a step."""
    made("first", "first", "second", "third").check_end(1)


def test_training_without_any_call_is_found_at_its_end() -> None:
    """Would catch a loop that calls none of the hooks."""
    made().check_end(0)
    with pytest.raises(UsageError, match="the hook first: was not called by the loop in step 1"):
        made().check_end(9)
