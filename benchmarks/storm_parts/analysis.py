"""What a storm has cost, from the journals and the actions; targets; the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from frame.page import ALL, Column, Spread, table_of

from .faults import DRIFT, KINDS, Fault
from .watch import Watch, events_after

LEAST_SPEED, LEAST_PARTICIPATION = 0.93, 0.95
MEDIAN_DELAY, LONGEST_DELAY = 1.0, 15.0  # seconds


@dataclass(frozen=True)
class Part:
    """A run with faults, or without.

    Attributes:
        journal: lines of the hub.
        actions: what was done to replicas, and has happened to them.
        digests: of the parameters at the end, by replica and rank.
    """

    journal: list[dict[str, Any]]
    actions: list[dict[str, Any]]
    digests: dict[str, list[str]]

    @classmethod
    def of(cls, watch: Watch) -> Part:
        """Take what a run has written."""
        return cls(watch.journal, watch.actions, watch.digests)

    @property
    def commits(self) -> list[dict[str, Any]]:
        """The lines of commits."""
        return self.after("commit", 0.0)

    def after(self, event: str, when: float, **having: Any) -> list[dict[str, Any]]:
        """Return lines of the journal of one kind, after a time, with these values."""
        return events_after(self.journal, event, when, **having)

    @property
    def rounds(self) -> list[float]:
        """Seconds between commits."""
        return [later["time"] - earlier["time"] for earlier, later in pairwise(self.commits)]

    @property
    def speed(self) -> float:
        """Committed samples per second of a replica that is alive and healed."""
        commits, live = self.commits, sum(end - begin for begin, end in Lives(self).spans)
        return (commits[-1]["samples"] - commits[0]["samples"]) / live if live else 0.0


class Lives:
    """Which replicas were alive and healed, followed in the order of time.

    Args:
        part: a run.

    Attributes:
        spans: from when to when a replica was alive and healed; several at a time.
        participation: of each commit but the first: of the replicas that were healed at the commit
            before and have had no fault since, the share that takes part.
    """

    def __init__(self, part: Part) -> None:
        self.spans: list[tuple[float, float]] = []
        self.participation: list[float] = []
        self._healed: dict[str, bool] = {}  # of those that run
        self._since: dict[str, float] = {}
        for line in sorted((*part.actions, *part.commits), key=lambda line: line["time"]):
            if "event" in line:
                self._commit(set(line["members"]), line["time"])
            else:
                self._action(line["action"], line["name"], line["time"])
        for name in list(self._since):
            self._close(name, part.commits[-1]["time"])

    def _commit(self, members: set[str], when: float) -> None:
        healed = {name for name, is_healed in self._healed.items() if is_healed}
        if healed:
            self.participation.append(len(healed & members) / len(healed))
        for name in members & self._healed.keys() - healed:
            self._healed[name], self._since[name] = True, when

    def _action(self, action: str, name: str, when: float) -> None:
        if action == "start":
            self._healed[name] = False
        elif action == "thaw" and self._healed.get(name):
            self._since[name] = when
        elif action in ("down", "end", "freeze"):
            self._close(name, when)
            if action != "freeze":
                self._healed.pop(name, None)

    def _close(self, name: str, when: float) -> None:
        since = self._since.pop(name, None)
        if since is not None and since < when:
            self.spans.append((since, when))


def delay_of(part: Part, fault: Fault, usual: float) -> float | None:
    """Return what the survivors of a kill have waited; None without a commit after it.

    From the last commit before the kill to the first one without the victim, beyond the usual
    length of as many rounds.

    Args:
        part: with the fault.
        fault: a kill.
        usual: seconds of a round.
    """
    before = [line for line in part.commits if line["time"] <= fault.began]
    for leave in part.after("leave", fault.began, name=fault.victim)[:1]:
        after = part.after("commit", leave["time"])
        if before and after:
            num_rounds = after[0]["round"] - before[-1]["round"]
            return float(after[0]["time"] - before[-1]["time"] - num_rounds * usual)
    return None


def blocks_of(part: Part) -> tuple[int, int, int]:
    """Return how many blocks are committed, and how many of them are lost and doubled."""
    committed: list[int] = []
    holes: list[list[int]] = []
    for line in part.commits:
        runs = [run for of_replica in line["blocks"].values() for run in of_replica]
        committed += [block for first, count in runs for block in range(first, first + count)]
        holes = line["holes"]
    if not committed:
        return 0, 0, 0
    known = set(committed)
    left = {block for first, count in holes for block in range(first, first + count)}
    wanted = set(range(max(known | left) + 1))
    num_lost = len(wanted - known - left)
    return len(committed), num_lost, len(committed) - len(known) + len(known & left)


def drifts_of(part: Part, faults: Sequence[Fault]) -> list[str]:
    """Return signs of different parameters that no flipped bit explains, one line each."""
    ranks = list(zip(*part.digests.values(), strict=True))
    is_different = any(len(set(of_replicas)) > 1 for of_replicas in ranks)
    flipped = {fault.victim for fault in faults if fault.kind == "flip"}
    left = {line["name"] for line in part.after("leave", 0.0, reason="drifted")} - flipped
    ended = part.after("end", 0.0, exit_code=DRIFT)
    return [
        *(["the parameters differ at the end"] if is_different else []),
        *(f"{name} has left as its results differ" for name in sorted(left)),
        *("the run has ended as results differ" for _ in ended),
    ]


@dataclass(frozen=True)
class Target:
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
        wanted = f"{'>=' if self.is_least else '<='} {self.bound:g}"
        return f"- {self.text}: {value}, wanted {wanted}: {'pass' if self.passes else 'MISS'}"


@dataclass(frozen=True)
class Summary:
    """A storm and its runs without faults, compared.

    Attributes:
        storm: the run with faults.
        references: the runs without.
        faults: that were made, in order.
        hangs, problems: one line each.
    """

    storm: Part
    references: Sequence[Part]
    faults: Sequence[Fault]
    hangs: Sequence[str] = ()
    problems: Sequence[str] = ()

    @property
    def usual(self) -> float:
        """Seconds of a round without faults."""
        rounds = [seconds for part in self.references for seconds in part.rounds]
        return median(rounds) if rounds else 0.0

    @property
    def speeds(self) -> list[float]:
        """Committed samples per live replica-second without faults."""
        return [part.speed for part in self.references]

    def delays(self, kind: str = "kill-") -> Spread | None:
        """Return the delays of the survivors of kills."""
        kills = (fault for fault in self.faults if fault.kind.startswith(kind) and fault.victim)
        found = (delay_of(self.storm, fault, self.usual) for fault in kills)
        return Spread.of([delay for delay in found if delay is not None])

    def targets(self) -> list[Target]:
        """Return all targets."""
        _, num_lost, num_doubled = blocks_of(self.storm)
        delays, taken = self.delays(), Spread.of(Lives(self.storm).participation)
        relative = self.storm.speed / median(self.speeds) if any(self.speeds) else None
        return [
            Target("hangs", len(self.hangs), 0, is_strict=True),
            Target("signs of drift", len(drifts_of(self.storm, self.faults)), 0, is_strict=True),
            Target("blocks lost", num_lost, 0, is_strict=True),
            Target("blocks doubled", num_doubled, 0, is_strict=True),
            Target("other problems", len(self.problems), 0, is_strict=True),
            Target("committed samples per live replica-second, of those without faults",
                   relative, LEAST_SPEED, is_least=True),
            Target("live healed replicas that take part in a commit, least",
                   None if taken is None else taken.min, LEAST_PARTICIPATION, is_least=True),
            Target("extra delay after a kill, median (s)",
                   None if delays is None else delays.median, MEDIAN_DELAY),
            Target("extra delay after a kill, longest (s)",
                   None if delays is None else delays.max, LONGEST_DELAY),
        ]  # fmt: skip

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each kind of fault that was made."""
        found = []
        for kind in KINDS:
            own = [fault for fault in self.faults if fault.kind == kind]
            whole = [fault.whole - fault.began for fault in own if fault.whole is not None]
            if own:
                delay = self.delays(kind) if kind.startswith("kill-") else None
                found.append(
                    {"kind": kind, "count": len(own), "whole": Spread.of(whole), "delay": delay}
                )
        return found

    def page(self) -> str:
        """Return the page in Markdown."""
        columns = [
            Column("fault", "kind"),
            Column("faults", "count"),
            Column("whole again (s)", "whole", "{:.1f}", of=ALL),
            Column("extra delay of survivors (s)", "delay", "{:.2f}", of=ALL),
        ]
        wrong = (*self.hangs, *drifts_of(self.storm, self.faults), *self.problems)
        parts = (
            table_of(columns, self.rows()) if self.faults else "",
            "\n".join(target.line for target in self.targets()),
            "\n".join(f"- {text}" for text in wrong),
        )
        return "\n\n".join(filter(None, parts))

    def results(self) -> dict[str, Any]:
        """Return the results for the JSON file."""
        return {
            "faults": len(self.faults),
            "blocks": blocks_of(self.storm)[0],
            "seconds_of_a_round": self.usual,
            "samples_per_live_replica_second": self.storm.speed,
            "reference_samples_per_live_replica_second": self.speeds,
            "kinds": self.rows(),
            "hangs": list(self.hangs),
            "drifts": drifts_of(self.storm, self.faults),
            "problems": list(self.problems),
            "targets": [
                {"text": t.text, "value": t.value, "bound": t.bound, "passes": t.passes}
                for t in self.targets()
            ],
        }
