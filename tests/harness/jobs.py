"""Messages between the preloaded server and its client."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """A request of `tests.harness.run_ranks`."""

    target: str
    world_size: int
    args: tuple[Any, ...]
    env: dict[str, str | None]
    cwd: Path
    directory: Path  # for rank<r>.stdout, rank<r>.stderr and rank<r>.value
    timeout: float
    grace: float


@dataclass(frozen=True)
class Report:
    """How a job ended."""

    returncodes: tuple[int, ...]
    timed_out: bool


def resolve(target: str) -> Callable[..., Any]:
    """Import and return the function that ``"package.module:function"`` names."""
    module, _, name = target.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
