"""Answering a call of Megatron's in its place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import BoundArguments
from typing import Any


@dataclass(frozen=True)
class Call[R]:
    """A call of Megatron's, before it is made.

    Attributes:
        function: Megatron's own.
        given: with which arguments; they may be changed.
    """

    function: Callable[..., R]
    given: BoundArguments

    @property
    def arguments(self) -> dict[str, Any]:
        """Those that were given, by name."""
        return self.given.arguments

    def proceed(self) -> R:
        """Make it."""
        return self.function(*self.given.args, **self.given.kwargs)


def answered_by[R](
    answer: Callable[[Call[R]], R],
) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """For `Patcher.wrap`: a function whose calls are answered by another one."""

    def around(function: Callable[..., R]) -> Callable[..., R]:
        signature = inspect.signature(function)

        @wraps(function)
        def answered(*args: object, **kwargs: object) -> R:
            return answer(Call(function, signature.bind(*args, **kwargs)))

        return answered

    return around
