"""The targets of the recommended setting, computed from the runs: reached, missed, or open."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_edit.tools.compare.statistics import Spread

from .analysis import Line
from .answers import Answers, gap
from .quality import (
    CHECKED,
    CLEAN,
    LONG,
    SHORT,
    muon,
    recommended,
    samples_labels,
)
from .run_bytes import relative_to_plain


@dataclass(frozen=True)
class Target:
    """One of them.

    Attributes:
        what: is measured.
        wanted: the bound, as text.
        found: the value, as text; "" where there is none yet.
        is_reached: None while runs are missing.
    """

    what: str
    wanted: str
    found: str
    is_reached: bool | None

    @property
    def verdict(self) -> str:
        """In a word or two."""
        words = {True: "reached", False: "**missed**", None: "open: runs are missing"}
        return words[self.is_reached]


def targets(answers: Answers) -> list[Target]:
    """All of them, in the order of the page."""
    return [
        *_adam(answers),
        _bytes(answers),
        *_muon(answers),
        *_bad_data(answers),
    ]


def _adam(answers: Answers) -> Iterator[Target]:
    for tau, bound in ((SHORT, 0.015), (LONG, 0.06)):
        line = answers.line("quality", recommended(tau))
        spread = gap(line, answers.baseline)
        yield _at_most(f"tau {tau}, 8 samples, beside stock DDP", spread, bound, line.planned)
    ddp, edit = (answers.line("quality-samples", label) for label in samples_labels(32))
    yield _at_most("tau 16, 32 samples, beside stock DDP", gap(edit, ddp), 0.003, edit.planned)


def _bytes(answers: Answers) -> Target:
    case = answers.line("quality", recommended(SHORT)).member.cases[0]
    ratio = relative_to_plain(case)
    what = "tau 16, bytes of the run over plain EDiT's (estimated)"
    return Target(what, "<= 1.3", f"{ratio:.2f}", ratio <= 1.3)


def _muon(answers: Answers) -> Iterator[Target]:
    line = answers.line("quality-muon", muon(recommended(SHORT)))
    what = "Muon, tau 16, beside stock DDP with AdamW"
    yield _at_most(what, gap(line, answers.baseline), -0.02, line.planned)


def _bad_data(answers: Answers) -> Iterator[Target]:
    checked, clean = (answers.line("quality-bursts", label) for label in (CHECKED, CLEAN))
    caught, bursts = bursts_caught(checked)
    yield Target(
        "bursts of random tokens left out within one round of their begin",
        "all of them",
        f"{caught} of {bursts}" if bursts else "",
        caught == bursts if _is_told(checked) else None,
    )
    rejected = [r for run in clean.records.values() for r in run.loss_rejections or ()]
    yield Target(
        "clean data left out because of their loss",
        "never",
        str(len(rejected)) if clean.records else "",
        not rejected if _is_told(clean) else None,
    )
    yield _at_most(
        "loss at the end with bursts, beside clean data", gap(checked, clean), 0.005,
        checked.planned,
    )  # fmt: skip


def _is_told(line: Line) -> bool:
    """Whether all runs are there, and say what the check of losses did."""
    told = [run for run in line.records.values() if run.loss_rejections is not None]
    return len(told) == line.planned


def bursts_caught(line: Line) -> tuple[int, int]:
    """How many bursts were left out at the latest a round after their first step, and of how many.

    The loss of a round must have been the reason. Runs that do not say so are not counted.
    """
    caught = bursts = 0
    for case in line.member.cases:
        run = line.records.get(case.seed)
        if run is None or run.loss_rejections is None or case.corruption is None:
            continue
        syncs = [it for it, replica in run.loss_rejections if replica == case.corruption.replica]
        for first, _ in case.corruption.bursts:
            bursts += 1
            caught += any(first <= iteration < first + case.tau for iteration in syncs)
    return caught, bursts


def _at_most(what: str, spread: Spread | None, bound: float, planned: int) -> Target:
    wanted = f"<= {bound:+.1%}"
    if spread is None:
        return Target(what, wanted, "", None)
    is_whole = spread.num == planned
    return Target(
        what, wanted, f"{spread.text('{:+.2%}'.format)}, {spread.num} of {planned} seeds",
        spread.mean <= bound if is_whole else None,
    )  # fmt: skip
