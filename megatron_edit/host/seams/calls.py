"""Interception of calls of Megatron's functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import BoundArguments
from typing import Any


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
