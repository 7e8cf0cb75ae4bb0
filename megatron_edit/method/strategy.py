"""The strategies: what a name on the command line means for the engine (method section 6)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """One rule of synchronisation.

    Attributes:
        name: the value of `--edit-strategy`.
        endless_warmup: gradients are averaged at every step; there is never an outer step.
        is_timed: replicas meet by the clock, after as many steps as each has made by then.
    """

    name: str
    endless_warmup: bool = False
    is_timed: bool = False


STRATEGIES = {
    "edit": Strategy("edit"),
    "a-edit": Strategy("a-edit", is_timed=True),
    "ddp": Strategy("ddp", endless_warmup=True),
}
