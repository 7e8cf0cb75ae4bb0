"""Reversible replacement of attributes, by which this package changes Megatron's code.

A `Patcher` refuses to replace missing attributes, so that a changed Megatron causes an error and
never a silent no-op, and restores all of them, newest first. Changes of other kinds (arguments,
the environment, the class of an optimizer) are listed in docs/dev/how-it-works.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from inspect import BoundArguments
from typing import Any

from megatron_edit.errors import HostVersionError, UsageError

_ABSENT: object = object()


@dataclass(frozen=True)
class _Replaced:
    owner: object
    name: str
    original: object  # `_ABSENT` if the owner's own `__dict__` did not have the name


@dataclass
class Patcher:
    """A stack of attribute replacements on modules, classes and instances.

    Attributes:
        host: name and version of the patched software in error messages.
    """

    host: str
    _undo: list[_Replaced] = field(default_factory=list)

    def replace(self, owner: object, name: str, new: object) -> None:
        """Set ``owner.name = new`` and record the original.

        Raises:
            HostVersionError: `owner` has no attribute `name`.
        """
        if not hasattr(owner, name):
            raise missing_symbol(self.host, owner, name)
        self.add(owner, name, new)

    def add(self, owner: object, name: str, new: object) -> None:
        """Like `replace`, but the attribute may be absent; it is then deleted by `undo`."""
        original = vars(owner).get(name, _ABSENT)
        self._undo.append(_Replaced(owner, name, original))
        setattr(owner, name, new)

    def wrap[F](self, owner: object, name: str, around: Callable[[F], object]) -> None:
        """Replace a callable by ``around(original)``."""
        if not hasattr(owner, name):
            raise missing_symbol(self.host, owner, name)
        self.add(owner, name, around(getattr(owner, name)))

    def set_default(self, environment: MutableMapping[str, str], name: str, value: str) -> None:
        """Set an environment variable unless it is set already."""
        if name not in environment:
            environment[name] = value
            self._undo.append(_Replaced(environment, name, _ABSENT))

    def undo(self) -> None:
        """Restore all originals, newest first. Idempotent."""
        while self._undo:
            entry = self._undo.pop()
            if isinstance(entry.owner, MutableMapping):
                entry.owner.pop(entry.name, None)
            elif entry.original is _ABSENT:
                delattr(entry.owner, entry.name)
            else:
                setattr(entry.owner, entry.name, entry.original)


def missing_symbol(host: str, owner: object, name: str) -> HostVersionError:
    """Make the error for a missing symbol that this package uses."""
    where = getattr(owner, "__name__", None) or type(owner).__name__
    return HostVersionError(
        f"{host}",
        f"{where}.{name} is missing, and megatron_edit needs it",
        "use a version that docs/support.md names, or report this one",
    )


# ---- Interception of calls of Megatron's functions


@dataclass(frozen=True)
class Call[R]:
    """An intercepted call of a Megatron function.

    Attributes:
        function: Megatron's function.
        given: its arguments, which may be changed.
    """

    function: Callable[..., R]
    given: BoundArguments

    @property
    def arguments(self) -> dict[str, Any]:
        """The given arguments, by name."""
        return self.given.arguments

    def proceed(self) -> R:
        """Call Megatron's function and return its result."""
        return self.function(*self.given.args, **self.given.kwargs)


def handled_by[R](
    answer: Callable[[Call[R]], R],
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Return a wrapper, for `Patcher.wrap`, that passes calls to `answer`."""

    def around(function: Callable[..., R]) -> Callable[..., R]:
        signature = inspect.signature(function)

        @wraps(function)
        def answered(*args: object, **kwargs: object) -> R:
            return answer(Call(function, signature.bind(*args, **kwargs)))

        return answered

    return around


# ---- Checks in the first steps that the training loop calls every hook
#
# A hook that is silently never called (a script replaces a function after the plugin has wrapped
# it, a callback is registered elsewhere) would leave the replicas training side by side without a
# sync.


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
