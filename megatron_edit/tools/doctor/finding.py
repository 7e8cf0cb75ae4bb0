"""What the doctor says, line by line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How a finding is to be taken."""

    OK = "ok"
    HINT = "hint"  # works, but could be better
    BAD = "bad"  # training would not start, or not end


@dataclass(frozen=True)
class DoctorFinding:
    """One line.

    Attributes:
        name: what was looked at.
        value: what it is.
        level: how to take it.
        remedy: what to do; empty where it is fine.
    """

    name: str
    value: str
    level: Level = Level.OK
    remedy: str = ""


def table(findings: Iterable[DoctorFinding]) -> str:
    """The findings as aligned lines, each with its remedy below it."""
    rows = list(findings)
    width = max((len(row.name) for row in rows), default=0)
    lines = []
    for row in rows:
        lines.append(f"{row.level:<4}  {row.name:<{width}}  {row.value}")
        if row.remedy:
            lines.append(f"{'':4}  {'':{width}}  -> {row.remedy}")
    return "\n".join(lines) + "\n"
