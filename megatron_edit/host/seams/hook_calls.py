"""Checks in the first steps that the training loop calls every hook.

A hook that is silently never called (a script replaces a function after the plugin has wrapped it,
a callback is registered elsewhere) would leave the replicas training side by side without a sync.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_edit.errors import UsageError

CHECKED_STEPS = 2


class HookCalls:
    """Counts calls of hooks in the first steps.

    Args:
        hooks: names of the hooks that every step calls, in this order.
        once: those that every step calls exactly once; at their calls all are checked.
        loop: name of the training loop, for messages.
        remedy: what to do where a hook is not called.
    """

    def __init__(self, hooks: Sequence[str], once: Sequence[str], loop: str, remedy: str) -> None:
        self._counts = dict.fromkeys(hooks, 0)
        self._once, self._loop, self._remedy = frozenset(once), loop, remedy

    def note(self, hook: str) -> None:
        """Count a call of a hook, and check the calls of the others so far.

        Raises:
            UsageError: a hook was not called.
        """
        self._counts[hook] += 1
        step = self._counts[hook]
        if step > CHECKED_STEPS or hook not in self._once:
            return
        expected = step  # of the hooks before this one; those after it are one step behind
        for name, count in self._counts.items():
            if name == hook:
                expected = step - 1
            if count < expected:
                raise self._missing(name, expected)

    def check_end(self, num_steps: int) -> None:
        """Check at the end of training that its hooks were called.

        Args:
            num_steps: that the loop has made.

        Raises:
            UsageError: a hook was not called.
        """
        for name, count in self._counts.items():
            if count < min(num_steps, CHECKED_STEPS):
                raise self._missing(name, count + 1)

    def _missing(self, hook: str, step: int) -> UsageError:
        return UsageError(
            f"the hook {hook}",
            f"was not called by {self._loop} in step {step}, so that EDiT would not sync",
            self._remedy,
        )
