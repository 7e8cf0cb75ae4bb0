"""The findings of the doctor, and their output as lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    HINT = "hint"  # works, but could be better
    BAD = "bad"  # training would fail


@dataclass(frozen=True)
class DoctorFinding:
    """One finding.

    Attributes:
        name: what was checked.
        value: the result.
        level: severity.
        remedy: what to do; empty if nothing.
    """

    name: str
    value: str
    level: Level = Level.OK
    remedy: str = ""


def table(findings: Iterable[DoctorFinding]) -> str:
    """Return the findings as aligned lines, each with its remedy below it."""
    rows = list(findings)
    width = max((len(row.name) for row in rows), default=0)
    lines = []
    for row in rows:
        lines.append(f"{row.level:<4}  {row.name:<{width}}  {row.value}")
        if row.remedy:
            lines.append(f"{'':4}  {'':{width}}  -> {row.remedy}")
    return "\n".join(lines) + "\n"
