"""What a question of the study is, and who is compared in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from .cases import Case


@dataclass(frozen=True)
class Member:
    """One line of a question's table.

    Attributes:
        label: for people.
        cases: one for each of its seeds.
        base: label of the member that it is compared with; "" for none.
        series: of a sweep: what belongs to one curve.
        place: of a sweep: where on the axis.
    """

    label: str
    cases: tuple[Case, ...]
    base: str = ""
    series: str = ""
    place: float = 0.0


@dataclass(frozen=True)
class Question:
    """What is asked, and who is compared.

    Attributes:
        name: for the command line.
        title: for people.
        members: lines of the table.
        axis: of a sweep: what `place` is; "" for any other question.
    """

    name: str
    title: str
    members: tuple[Member, ...]
    axis: str = ""

    @property
    def cases(self) -> Iterator[Case]:
        """All runs: every member with the first seed, then with the next."""
        for cases in zip_longest(*(member.cases for member in self.members)):
            yield from (case for case in cases if case is not None)
