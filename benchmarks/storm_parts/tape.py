"""The faults of a storm: a tape that follows from a seed and a length alone."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from megatron_edit.atomic_files import write_atomic


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: of the kind.
        share: how many of 60 faults are of this kind.
        places: inside of the victim, which take turns; see `hooks`.
        seconds: range of the length of the fault; see `faults`.
    """

    name: str
    share: int
    places: tuple[str, ...] = ("",)
    seconds: tuple[float, float] = (0.0, 0.0)


KINDS = (
    Kind("hub-kill", 10, seconds=(0.0, 3.0)),
    Kind("kill-train", 4, ("train",)),
    Kind("kill-gather", 4, ("late", "arrived", "records")),
    Kind("kill-exchange", 5, ("exchange", "result", "ready", "commit")),
    Kind("kill-save", 4, ("save-begin", "save-end", "save-commit")),
    Kind("kill-leader", 4, seconds=(0.0, 2.0)),
    Kind("kill-rank", 4, seconds=(0.0, 2.0)),
    Kind("freeze-short", 4, seconds=(1.0, 6.0)),
    Kind("kill-donor", 3, ("copy",), (1.0, 4.0)),
    Kind("freeze-long", 3, seconds=(0.0, 4.0)),
    Kind("term", 3, seconds=(0.0, 2.0)),
    Kind("term-kill", 3, seconds=(0.0, 0.3)),
    Kind("join", 3, seconds=(1.0, 6.0)),
    Kind("flip", 4, ("flip-anchor", "flip-average", "flip-momentum", "flip-sent")),
    Kind("hub-freeze", 2, seconds=(2.0, 12.0)),
)
RESTART_SECONDS = (1.0, 5.0)  # until whatever starts processes has noticed that one has ended
PAUSES = (0.5, 1.5)  # of the mean pause
BITS = (12, 30)  # of a float32 that are flipped: a smaller change may be rounded away


@dataclass(frozen=True)
class Fault:
    """A fault of the tape.

    Attributes:
        number: from 0.
        kind: see `KINDS`.
        place: inside of the victim; empty where there is none.
        pause: seconds before it, in which the run is whole.
        seconds: length of the fault.
        restart: seconds until an ended replica is started again.
        victim, rank: which of the replicas, and of its ranks, as fractions of all.
        unit, element: of a flipped bit, as fractions.
        bit: that is flipped.
    """

    number: int
    kind: str
    place: str
    pause: float
    seconds: float
    restart: float
    victim: float
    rank: float
    unit: float
    element: float
    bit: int


@dataclass(frozen=True)
class Tape:
    """A tape, and the settings of its storm, which must not change when it is resumed."""

    settings: dict[str, Any]
    faults: tuple[Fault, ...]

    @classmethod
    def draw(cls, settings: dict[str, Any]) -> Self:
        """The tape of a seed, a number of faults and a mean pause."""
        return cls(settings, draw(settings["seed"], settings["faults"], settings["pause"]))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a tape that was written."""
        has = json.loads(path.read_text(encoding="utf-8"))
        return cls(has["settings"], tuple(Fault(**each) for each in has["faults"]))

    def write(self, path: Path) -> None:
        """Write it, one fault a line."""
        lines = ",\n  ".join(json.dumps(asdict(each)) for each in self.faults)
        settings = json.dumps(self.settings)
        text = f'{{"settings": {settings},\n "faults": [\n  {lines}\n ]}}\n'
        write_atomic(path, text)


def draw(seed: int, count: int, mean_pause: float) -> tuple[Fault, ...]:
    """Draw a tape: kinds in their shares, in random order."""
    dice = random.Random(seed)
    kinds = _kinds(count)
    dice.shuffle(kinds)
    turns = {kind.name: dice.randrange(len(kind.places)) for kind in KINDS}
    return tuple(_draw_fault(dice, number, kind, turns, mean_pause)
                 for number, kind in enumerate(kinds))  # fmt: skip


def _kinds(count: int) -> list[Kind]:
    """So many kinds, each as often as its share says, as closely as that is possible."""
    total, taken = sum(kind.share for kind in KINDS), Counter[str]()
    kinds: list[Kind] = []
    for number in range(1, count + 1):
        kind = max(KINDS, key=lambda k: number * k.share / total - taken[k.name])
        taken[kind.name] += 1
        kinds.append(kind)
    return kinds


def _draw_fault(
    dice: random.Random, number: int, kind: Kind, turns: dict[str, int], mean_pause: float
) -> Fault:
    place = kind.places[turns[kind.name] % len(kind.places)]
    turns[kind.name] += 1
    return Fault(
        number,
        kind.name,
        place,
        pause=_between(dice, [mean_pause * factor for factor in PAUSES]),
        seconds=_between(dice, kind.seconds),
        restart=_between(dice, RESTART_SECONDS),
        victim=dice.random(),
        rank=dice.random(),
        unit=dice.random(),
        element=dice.random(),
        bit=dice.randint(*BITS),
    )


def _between(dice: random.Random, bounds: Sequence[float]) -> float:
    return round(dice.uniform(*bounds), 3)
