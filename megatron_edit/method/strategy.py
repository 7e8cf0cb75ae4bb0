"""The strategies: what a name on the command line means for the engine (method section 6)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Strategy:
    """One rule of synchronisation.

    Attributes:
        name: the value of `--edit-strategy`.
        endless_warmup: gradients are averaged at every step; there is never an outer step.
    """

    name: str
    endless_warmup: bool = False


STRATEGIES = {
    "edit": Strategy("edit"),
    "ddp": Strategy("ddp", endless_warmup=True),
}
