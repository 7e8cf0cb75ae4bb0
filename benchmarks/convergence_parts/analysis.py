"""From finished runs to answers: means over seeds, and differences seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from megatron_edit.tools.compare.statistics import Spread, differences, quotients

from .cases import Case, Member, Question
from .records import RunSummary
from .study import Study

Find = Callable[[Case], RunSummary | None]


@dataclass(frozen=True)
class Line:
    """A member of a question, as far as its runs are finished.

    Attributes:
        member: which.
        planned: runs.
        records: of the finished ones, by seed.
        loss: at the end.
        difference: of it to that of the member's base, seed by seed.
        relative: the same over the loss of the base.
        num_better: pairs in which it is lower than the base's.
        refusal: why this version cannot run it; "" if it can.
    """

    member: Member
    planned: int
    records: dict[int, RunSummary]
    loss: Spread | None
    difference: Spread | None
    relative: Spread | None
    num_better: int
    refusal: str

    @property
    def bytes_per_step(self) -> Spread | None:
        """Of one replica, after the warm-up."""
        return Spread.of([record.bytes_per_step for record in self.records.values()])

    @property
    def effective(self) -> Spread | None:
        """Median number of replicas that counted."""
        return Spread.of([record.effective_replicas for record in self.records.values()])

    @property
    def left_out(self) -> str:
        """By replica: the share of syncs and units without it, mean over the seeds."""
        rows = [record.left_out for record in self.records.values() if record.left_out]
        means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
        return " ".join(f"{mean:.1%}" for mean in means) if any(means) else ""


def make_lines(question: Question, find: Find) -> list[Line]:
    """A line for each member."""
    records = {member.label: _finished(member, find) for member in question.members}
    return [_line(member, records) for member in question.members]


def _line(member: Member, records: dict[str, dict[int, RunSummary]]) -> Line:
    losses = _losses(records[member.label])
    base = _losses(records.get(member.base, {}))
    pairs = differences(losses, base)
    return Line(
        member=member,
        planned=len(member.cases),
        records=records[member.label],
        loss=Spread.of(list(losses.values())),
        difference=Spread.of(pairs),
        relative=Spread.of([ratio - 1 for ratio in quotients(losses, base)]),
        num_better=sum(pair < 0 for pair in pairs),
        refusal=member.cases[0].refusal,
    )


def _finished(member: Member, find: Find) -> dict[int, RunSummary]:
    found = {case.seed: find(case) for case in member.cases}
    return {seed: record for seed, record in found.items() if record is not None}


def _losses(records: dict[int, RunSummary]) -> dict[int, float]:
    return {seed: record.final_loss for seed, record in records.items()}


@dataclass(frozen=True)
class Backlog:
    """How much of a question is done. Runs that an earlier question has are not counted again.

    Attributes:
        question: which.
        planned: runs.
        finished: of them.
        refused: runs that this version of the package cannot make.
        refused_cost: of them.
        todo: what is left and can be made.
    """

    question: Question
    planned: int
    finished: int
    refused: int
    refused_cost: int
    todo: tuple[Case, ...]

    @property
    def cost(self) -> int:
        """Of what is left: steps of single replicas."""
        return sum(case.cost for case in self.todo)


def make_backlog(study: Study, find: Find, only: Iterable[str] = ()) -> list[Backlog]:
    """What there is to do, in order of priority.

    Args:
        study: all questions.
        find: finished runs.
        only: names of questions; none for all.
    """
    wanted, seen, backlog = set(only), set(), []
    for question in study.questions:
        if wanted and question.name not in wanted:
            continue
        # `ddp` is the same run whatever the interval: what it is told decides.
        new: dict[object, Case] = {}
        for case in question.cases:
            key = case if case.refusal else case.hash({})
            if key not in seen:
                seen.add(key)
                new[key] = case
        refused = [case.cost for case in new.values() if case.refusal]
        done = {key for key, case in new.items() if find(case) is not None}
        todo = [case for key, case in new.items() if key not in done and not case.refusal]
        backlog.append(
            Backlog(question, len(new), len(done), len(refused), sum(refused), tuple(todo))
        )
    return backlog
