"""The page of a storm, and its targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frame.page import ALL, Column, Spread, table_of

from .analysis import Summary
from .faults import Done
from .tape import KINDS

MAX_MINUTES = 40.0
LEAST_SPEED, LEAST_PARTICIPATION = 0.93, 0.95
MEDIAN_DELAY, LONGEST_DELAY = 1.0, 15.0  # seconds; the longest: and an exchange
MOST_SYNCS = 2
MOST_CONTROL = 0.01  # of a step


@dataclass(frozen=True)
class Verdict:
    """A number and its bound.

    Attributes:
        text: what it is.
        value: measured; None where nothing was measured.
        bound: of it.
        is_least: whether that is a lower bound.
        is_strict: whether a miss is a fault of the program, and not a number of this machine.
    """

    text: str
    value: float | None
    bound: float
    is_least: bool = False
    is_strict: bool = False

    @property
    def passes(self) -> bool:
        """Whether it is within its bound."""
        if self.value is None:
            return not self.is_strict
        return self.value >= self.bound if self.is_least else self.value <= self.bound

    @property
    def line(self) -> str:
        """As an item of a list."""
        value = "not measured" if self.value is None else f"{self.value:.3f}"
        sign = ">=" if self.is_least else "<="
        return (
            f"- {self.text}: {value}, wanted {sign} {self.bound:g}: "
            f"{'pass' if self.passes else 'MISS'}"
        )


def verdicts(summary: Summary) -> list[Verdict]:
    """All targets."""
    delays = Spread.of([delay.seconds for delay in summary.delays])
    syncs = Spread.of([each.syncs for each in summary.returns])
    participation = Spread.of(summary.participation)
    longest = LONGEST_DELAY + (summary.usual_exchange or 0.0)
    return [
        Verdict("hangs", len(summary.hangs), 0, is_strict=True),
        Verdict("signs of drift", len(summary.drifts), 0, is_strict=True),
        Verdict("blocks lost", summary.num_lost, 0, is_strict=True),
        Verdict("blocks doubled", summary.num_doubled, 0, is_strict=True),
        Verdict("other problems", len(summary.problems), 0, is_strict=True),
        Verdict("minutes", summary.minutes, MAX_MINUTES),
        Verdict("committed samples per live replica-second, of those without faults",
                summary.relative_speed, LEAST_SPEED, is_least=True),
        Verdict("live healed replicas that take part in a commit, least",
                None if participation is None else participation.min, LEAST_PARTICIPATION,
                is_least=True),
        Verdict("extra delay after a kill, median (s)",
                None if delays is None else delays.median, MEDIAN_DELAY),
        Verdict("extra delay after a kill, longest (s)",
                None if delays is None else delays.max, longest),
        Verdict("syncs until a replica that has joined counts, most",
                None if syncs is None else syncs.max, MOST_SYNCS),
        Verdict("control time per step without faults, share of a step",
                summary.control_share, MOST_CONTROL),
    ]  # fmt: skip


@dataclass(frozen=True)
class Row:
    """All faults of a kind.

    Attributes:
        kind: of the faults.
        count: of them.
        problems: of them that went wrong.
        whole: seconds from the fault until the run was whole again.
        delay: extra seconds of the survivors of a kill.
        cost: seconds of live replicas without samples.
    """

    kind: str
    count: int
    problems: int
    whole: Spread | None
    delay: Spread | None
    cost: Spread | None


def rows(summary: Summary, dones: Sequence[Done]) -> list[Row]:
    """A row for each kind that was made."""
    found = []
    for kind in KINDS:
        of_kind = [done for done in dones if done.kind == kind.name]
        whole = [done.whole - done.began for done in of_kind if done.whole is not None]
        extra = [delay.seconds for delay in summary.delays if delay.kind == kind.name]
        costs = [cost.seconds for cost in summary.costs if cost.kind == kind.name]
        if of_kind:
            problems = sum(bool(done.problem) for done in of_kind)
            spreads = (Spread.of(whole), Spread.of(extra), Spread.of(costs))
            found.append(Row(kind.name, len(of_kind), problems, *spreads))
    return found


def control_rows(summary: Summary) -> list[dict[str, Any]]:
    """What the hub costs in each run without faults."""
    return [
        {
            "seconds_of_a_step": control.step,
            "main_thread_per_step": control.main,
            "agent_cpu_per_step": control.agent,
            "share_of_a_step": control.share,
            "per_meeting": Spread.of(control.meetings),
            "exchange": Spread.of(control.exchanges),
        }
        for control in summary.controls
    ]


def page(summary: Summary, dones: Sequence[Done]) -> str:
    """The page in Markdown."""
    columns = [
        Column("fault", "kind"),
        Column("faults", "count"),
        Column("went wrong", "problems"),
        Column("whole again (s)", "whole", "{:.1f}", of=ALL),
        Column("extra delay of survivors (s)", "delay", "{:.2f}", of=ALL),
        Column("cost (replica-seconds)", "cost", "{:.1f}", of=ALL),
    ]
    of_control = [
        Column("without faults: step (s)", "seconds_of_a_step", "{:.3f}"),
        Column("control in a step: main thread (ms)", "main_thread_per_step", "{:.3f}", 1e3),
        Column("agent's thread (ms)", "agent_cpu_per_step", "{:.3f}", 1e3),
        Column("share of a step (%)", "share_of_a_step", "{:.2f}", 1e2),
        Column("control in a meeting (ms)", "per_meeting", "{:.1f}", 1e3, of=ALL),
        Column("exchange (ms)", "exchange", "{:.1f}", 1e3, of=ALL),
    ]
    wrong = [f"- {text}" for text in (*summary.hangs, *summary.drifts, *summary.problems)]
    return "\n\n".join(
        filter(
            None,
            [
                table_of(columns, rows(summary, dones)) if dones else "",
                table_of(of_control, control_rows(summary)),
                "\n".join(verdict.line for verdict in verdicts(summary)),
                "\n".join(wrong),
            ],
        )
    )


def series(summary: Summary, dones: Sequence[Done]) -> dict[str, Any]:
    """The results for the JSON file."""
    return {
        "faults": summary.num_faults,
        "parts": summary.num_parts,
        "minutes": summary.minutes,
        "load_of_the_machine": Spread.of([done.load for done in dones]),
        "blocks": summary.num_blocks,
        "seconds_of_a_round": summary.usual_round,
        "seconds_of_a_round_between_faults": summary.quiet_round,
        "samples_per_live_replica_second": summary.speed,
        "of_rounds_between_faults": summary.speed_of_quiet_rounds,
        "reference_samples_per_live_replica_second": list(summary.reference_speeds),
        "control_without_faults": control_rows(summary),
        "participation": Spread.of(summary.participation),
        "commits_without_a_live_replica": sum(x < 1 for x in summary.participation),
        "kinds": rows(summary, dones),
        "delays": list(summary.delays),
        "returns": list(summary.returns),
        "hangs": list(summary.hangs),
        "drifts": list(summary.drifts),
        "problems": list(summary.problems),
        "targets": [
            {"text": v.text, "value": v.value, "bound": v.bound, "passes": v.passes}
            for v in verdicts(summary)
        ],
    }
