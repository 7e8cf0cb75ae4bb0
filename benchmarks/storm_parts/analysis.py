"""What a storm has cost, from the files of its parts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megatron_edit.observe.line_files import read_json_lines

from .control import Control
from .faults import Done
from .watch import ACTIONS, OUTCOME, Shape

KILLS = ("kill-train", "kill-gather", "kill-exchange", "kill-save", "kill-leader", "kill-rank",
         "kill-donor")  # fmt: skip
WARMUP_STEPS = 2
DRIFT = 3  # exit code


@dataclass(frozen=True)
class Part:
    """One run of a storm, or of its reference.

    Attributes:
        commits: lines of the journal.
        journal: all its lines.
        actions: what was done to replicas, and has happened to them.
        digests: of the parameters at the end, by replica and rank; None where it did not end.
        control: what the hub costs; None where it was not measured.
        replicas: that the run begins with.
    """

    commits: tuple[dict[str, Any], ...]
    journal: tuple[dict[str, Any], ...]
    actions: tuple[dict[str, Any], ...]
    digests: Mapping[str, Sequence[str]] | None
    control: Control | None = None
    replicas: int = Shape.replicas

    @classmethod
    def read(cls, folder: Path) -> Part:
        """Read the files of a part."""
        journal, outcome = folder / "hub" / "journal.jsonl", folder / OUTCOME
        lines = tuple(read_json_lines(journal)) if journal.exists() else ()
        return cls(
            tuple(line for line in lines if line["event"] == "commit"),
            lines,
            tuple(read_json_lines(folder / ACTIONS)),
            json.loads(outcome.read_text())["digests"] if outcome.exists() else None,
            Control.read(folder),
            next((line["nominal"] for line in lines if line["event"] == "join"), Shape.replicas),
        )

    def after(self, event: str, when: float, **having: Any) -> Iterator[dict[str, Any]]:
        """Lines of the journal of one kind, after a time, with these values."""
        wanted = {"event": event} | having
        for line in self.journal:
            if line["time"] > when and all(line.get(key) == wanted[key] for key in wanted):
                yield line

    @property
    def seconds(self) -> float:
        """From the first commit to the last."""
        return self.commits[-1]["time"] - self.commits[0]["time"] if self.commits else 0.0

    @property
    def samples(self) -> int:
        """Committed after the first commit."""
        if not self.commits:
            return 0
        return int(self.commits[-1]["samples"] - self.commits[0]["samples"])

    @property
    def rounds(self) -> list[float]:
        """Seconds between commits."""
        times = [line["time"] for line in self.commits]
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def problems(self) -> list[dict[str, Any]]:
        """What must not happen."""
        return [line for line in self.actions if line["action"] == "problem"]


# ---- who is alive


@dataclass
class _Replica:
    """A replica at a time: whether it runs, and whether it has been in a commit; since when its
    seconds count."""

    is_healed: bool = False
    since: float | None = None


@dataclass
class Lives:
    """Which replicas were alive and healed.

    Attributes:
        spans: from when to when a replica was alive and healed; several at a time.
        participation: of each commit but the first: of the replicas that were healed at the commit
            before and have had no fault since, the share that takes part.
    """

    spans: list[tuple[float, float]] = field(default_factory=list)
    participation: list[float] = field(default_factory=list)
    _up: dict[str, _Replica] = field(default_factory=dict)

    @classmethod
    def of(cls, part: Part) -> Lives:
        """Follow a part in the order of time."""
        lives = cls()
        lines = sorted((*part.actions, *part.commits), key=lambda line: line["time"])
        for line in lines:
            if "event" in line:
                lives._commit(line)
            else:
                lives._action(line["action"], line["name"], line["time"])
        for name in list(lives._up):
            if part.commits:
                lives._close(name, part.commits[-1]["time"])
        return lives

    def _commit(self, line: Mapping[str, Any]) -> None:
        healed = {name for name, replica in self._up.items() if replica.is_healed}
        members = set(line["members"])
        if healed:
            self.participation.append(len(healed & members) / len(healed))
        for name in members & self._up.keys() - healed:
            self._up[name].is_healed, self._up[name].since = True, line["time"]

    def _action(self, action: str, name: str, when: float) -> None:
        if action == "start":
            self._up[name] = _Replica()
        elif action == "thaw" and name in self._up:
            self._up[name].since = when
        elif action in ("down", "end", "freeze"):
            self._close(name, when)
            if action != "freeze":
                self._up.pop(name, None)

    def _close(self, name: str, when: float) -> None:
        replica = self._up.get(name)
        if replica is not None and replica.since is not None:
            self.spans.append((replica.since, when))
            replica.since = None

    def seconds(self, begin: float = 0.0, end: float = math.inf) -> float:
        """Seconds of all replicas, from the first commit to the last, inside a time."""
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in self.spans)


# ---- faults


@dataclass(frozen=True)
class Delay:
    """What the survivors of a kill have waited.

    Attributes:
        kind, place: of the fault.
        seconds: from the last commit before the kill to the first one without the victim, beyond
            the usual length of as many rounds.
        has_joiner: whether another replica had joined before that commit: the others wait for it.
    """

    kind: str
    place: str
    seconds: float
    has_joiner: bool


def delay_of(part: Part, done: Done, usual: float) -> Delay | None:
    """The delay after a kill; None where the journal does not have what follows it.

    Args:
        part: with the fault.
        done: the fault.
        usual: seconds of a round.
    """
    before = [line for line in part.commits if line["time"] <= done.began]
    leave = next(part.after("leave", done.began, name=done.victim), None)
    if not before or leave is None:
        return None
    after = next(part.after("commit", leave["time"]), None)
    if after is None:
        return None
    num_rounds = after["round"] - before[-1]["round"]
    seconds = after["time"] - before[-1]["time"] - num_rounds * usual
    joins = [each for each in part.after("join", done.began) if each["time"] < after["time"]]
    return Delay(done.kind, done.place, seconds, bool(joins))


@dataclass(frozen=True)
class Cost:
    """What a fault has cost, up to the next one.

    Attributes:
        kind: of the fault.
        seconds: of live replicas, that have brought no samples; from the last commit before the
            fault to the last one before the next fault.
    """

    kind: str
    seconds: float


def costs_of(part: Part, dones: Sequence[Done], speed: float) -> list[Cost]:
    """The cost of each fault of a part.

    Args:
        part: of the storm.
        dones: its faults, in order.
        speed: samples per live replica-second without faults.
    """
    lives, found = Lives.of(part), []
    ends = [*(done.began for done in dones[1:]), math.inf]
    for done, end in zip(dones, ends, strict=False):  # without a fault there is one end
        first = [line for line in part.commits if line["time"] <= done.began]
        last = [line for line in part.commits if line["time"] <= end]
        if first and speed:
            live = lives.seconds(first[-1]["time"], last[-1]["time"])
            samples = last[-1]["samples"] - first[-1]["samples"]
            found.append(Cost(done.kind, live - samples / speed))
    return found


def quiet_rounds_of(part: Part, dones: Sequence[Done]) -> list[float]:
    """Seconds of the rounds of a part between two faults, in which it was whole."""
    begins = [done.whole for done in dones if done.whole is not None]
    ends = [*(done.began for done in dones[1:]), math.inf]
    times = [line["time"] for line in part.commits]
    return [
        later - earlier
        for begin, end in zip(begins, ends, strict=False)
        for earlier, later in pairwise(times)
        if begin <= earlier and later <= end
    ]


EXCHANGE_SECONDS = 0.25  # a commit so soon after a join was exchanged before it


@dataclass(frozen=True)
class Return:
    """A replica that has joined, or come back.

    Attributes:
        name: of the replica.
        syncs: commits from its joining to the first with samples of it, that one included; without
            one that the others were exchanging already.
        seconds: from its joining to that commit.
    """

    name: str
    syncs: int
    seconds: float


def returns_of(part: Part) -> list[Return]:
    """All joins after the first commit whose replica has not left before it counts."""
    found = []
    for join in part.after("join", part.commits[0]["time"]) if part.commits else ():
        name, when = join["name"], join["time"]
        leave = next((each["seq"] for each in part.after("leave", when, name=name)), math.inf)
        commits = [each for each in part.after("commit", when) if each["seq"] < leave]
        number = next((n for n, each in enumerate(commits) if each["blocks"].get(name)), None)
        if number is not None:
            syncs = number + 1 - _was_exchanging(part, join, commits[0])
            found.append(Return(name, syncs, commits[number]["time"] - when))
    return found


def _was_exchanging(part: Part, join: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Whether the others were exchanging a round when a replica has joined: the groups of an epoch
    were formed and not used yet, or the commit `first` came right after it."""
    is_formed = False
    for event in [line["event"] for line in part.journal if line["seq"] < join["seq"]]:
        is_formed = event == "epoch" or (is_formed and event != "commit")
    is_late = first["time"] - join["time"] < EXCHANGE_SECONDS
    return is_formed or (is_late and join["name"] not in first["members"])


# ---- blocks and parameters


def blocks_of(part: Part) -> tuple[int, int, int]:
    """Blocks of a part: how many are committed, and how many of them lost and doubled."""
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
    wanted = set(range(WARMUP_STEPS * part.replicas, max(known | left) + 1))
    num_lost = len(wanted - known - left) + len(known - wanted)
    return len(committed), num_lost, len(committed) - len(known) + len(known & left)


def drifts_of(part: Part, dones: Sequence[Done]) -> list[str]:
    """Signs of different parameters that no flipped bit explains, one line each."""
    found = []
    if part.digests is not None:
        ranks = list(zip(*part.digests.values(), strict=True))
        if any(len(set(of_replicas)) > 1 for of_replicas in ranks):
            found.append("the parameters differ at the end")
    flipped = {done.victim for done in dones if done.kind == "flip"}
    for line in part.after("leave", 0.0, reason="drifted"):
        if line["name"] not in flipped:
            found.append(f"{line['name']} has left as its results differ")
    found += [
        "the run has ended as results differ" for _ in part.after("end", 0.0, exit_code=DRIFT)
    ]
    return found


# ---- all together


@dataclass(frozen=True)
class Summary:
    """Numbers of a storm; see `report` for what they are compared with."""

    num_faults: int
    num_parts: int
    minutes: float
    usual_round: float
    quiet_round: float
    speed: float
    reference_speeds: tuple[float, ...]
    controls: tuple[Control, ...]
    costs: tuple[Cost, ...]
    participation: tuple[float, ...]
    delays: tuple[Delay, ...]
    returns: tuple[Return, ...]
    num_blocks: int
    num_lost: int
    num_doubled: int
    drifts: tuple[str, ...]
    hangs: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def relative_speed(self) -> float | None:
        """Committed samples per live replica-second, over those without faults."""
        references = self.reference_speeds
        return self.speed / median(references) if references and self.num_parts else None

    @property
    def usual_exchange(self) -> float | None:
        """Seconds of an exchange without faults, the median."""
        seconds = [each for control in self.controls for each in control.exchanges]
        return median(seconds) if seconds else None

    @property
    def control_share(self) -> float | None:
        """Control time of a step as a share of it, in the run without faults where it is larger."""
        return max((control.share for control in self.controls), default=None)

    @property
    def speed_of_quiet_rounds(self) -> float | None:
        """The same, over rounds between the faults: whether the machine was as fast as in the runs
        without faults."""
        if not self.quiet_round or not self.usual_round or self.relative_speed is None:
            return None
        return self.relative_speed * self.quiet_round / self.usual_round


def speed_of(parts: Sequence[Part]) -> float:
    """Committed samples per live replica-second."""
    live = sum(Lives.of(part).seconds() for part in parts)
    return sum(part.samples for part in parts) / live if live else 0.0


def summarize(parts: Sequence[Part], references: Sequence[Part], dones: Sequence[Done]) -> Summary:
    """All numbers of a storm."""
    usual = _median([seconds for part in references for seconds in part.rounds])
    of_parts = [(part, [done for done in dones if done.part == number])
                for number, part in enumerate(parts)]  # fmt: skip
    reference_speeds = [speed_of([part]) for part in references]
    delays = [
        delay_of(part, done, usual)
        for part, made in of_parts
        for done in made
        if done.kind in KILLS and done.victim
    ]
    blocks = [blocks_of(part) for part in parts]
    problems = [each for part in (*parts, *references) for each in part.problems]
    return Summary(
        num_faults=len(dones),
        num_parts=len(parts),
        minutes=sum(part.seconds for part in parts) / 60,
        usual_round=usual,
        quiet_round=_median([x for part, made in of_parts for x in quiet_rounds_of(part, made)]),
        speed=speed_of(parts),
        reference_speeds=tuple(reference_speeds),
        controls=tuple(part.control for part in references if part.control is not None),
        costs=tuple(
            cost
            for part, made in of_parts
            for cost in costs_of(part, made, _median(reference_speeds))
        ),
        participation=tuple(x for part in parts for x in Lives.of(part).participation),
        delays=tuple(delay for delay in delays if delay is not None),
        returns=tuple(each for part in parts for each in returns_of(part)),
        num_blocks=sum(count for count, _, _ in blocks),
        num_lost=sum(lost for _, lost, _ in blocks),
        num_doubled=sum(doubled for _, _, doubled in blocks),
        drifts=tuple(text for part, made in of_parts for text in drifts_of(part, made)),
        hangs=tuple(each["text"] for each in problems if each["kind"] == "hang"),
        problems=tuple(each["text"] for each in problems if each["kind"] != "hang"),
    )


def _median(values: Sequence[float]) -> float:
    """The median; 0 of no values."""
    return median(values) if values else 0.0
