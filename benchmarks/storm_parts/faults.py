"""The kinds of faults of a storm: how they are drawn, and how each is made."""

from __future__ import annotations

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .watch import KILLED, HangError, Watch

RESTART_SECONDS = (1.0, 5.0)  # until whatever starts processes has noticed that one has ended
HIT_SECONDS = 60.0  # until a process comes to a place
HIT_POLL_SECONDS = 0.01
EVICT_SECONDS = 60.0  # until a frozen replica is taken for lost
LEAVE_SECONDS = 30.0  # from SIGTERM, or from the hub's last message, to the end of the process
BITS = (12, 30)  # of a float32 that are flipped: a smaller change may be rounded away
FENCED, DRIFT = 5, 3  # exit codes


@dataclass
class Fault:
    """A fault that is being made, or was.

    Attributes:
        number: from 0.
        kind: name of its kind.
        place: in the victim; see `hooks`. Empty for none.
        seconds: its length; see the function that makes it.
        dice: of all its draws.
        victim: name of the replica; empty for the hub.
        began: when it was made, in seconds since 1970.
        ended: when everything was running again that the fault had stopped.
        whole: when the run was whole again; None where it was not in time.
    """

    number: int
    kind: str
    place: str
    seconds: float
    dice: random.Random
    victim: str = ""
    began: float = 0.0
    ended: float = 0.0
    whole: float | None = None

    @property
    def restart(self) -> float:
        """Seconds until the victim is started again."""
        return self.dice.uniform(*RESTART_SECONDS)

    def draw_victim(self, watch: Watch) -> str:
        """Draw the victim."""
        self.victim = self.dice.choice(watch.shape.names)
        return self.victim

    def make(self, watch: Watch) -> None:
        """Make the fault, and wait until the run is whole again.

        Raises:
            HangError: what must follow does not come.
        """
        self.began = time.time()
        KINDS[self.kind].make(watch, self)
        watch.wait_until_whole(self.ended)
        self.whole = time.time()


def draw(seed: int, count: int) -> list[Fault]:
    """Draw faults, which follow from seed and number alone: kinds in their shares, shuffled."""
    total, taken = sum(kind.share for kind in KINDS.values()), Counter[str]()
    for number in range(1, count + 1):
        taken[max(KINDS, key=lambda k: number * KINDS[k].share / total - taken[k])] += 1
    names = list(taken.elements())
    random.Random(seed).shuffle(names)
    found, used = [], Counter[str]()
    for number, name in enumerate(names):
        kind, dice = KINDS[name], random.Random(f"{seed} {number}")
        place = kind.places[used[name] % len(kind.places)]
        used[name] += 1
        found.append(Fault(number, name, place, dice.uniform(*kind.seconds), dice))
    return found


# ---- replicas are killed


def _kill_at_place(watch: Watch, fault: Fault) -> None:
    """Kill a replica at a place inside of it."""
    hit = _hit(watch, fault, _trigger_of_victim(watch, fault))
    _killed(watch, fault, hit["name"], hit["time"])


def _kill_saving(watch: Watch, fault: Fault) -> None:
    """Kill the replica that writes a checkpoint."""
    hit = _hit(watch, fault, watch.folder / "triggers" / "any" / fault.place)
    _killed(watch, fault, hit["name"], hit["time"])


def _kill_leader(watch: Watch, fault: Fault) -> None:
    """Kill the leader of the newest epoch."""
    watch.pause(fault.seconds)
    leader = str(watch.events_after("epoch", 0.0)[-1]["leader"])
    watch.run.signal(leader, signal.SIGKILL)
    _killed(watch, fault, leader, time.time())


def _kill_rank(watch: Watch, fault: Fault) -> None:
    """Kill one rank at any time; the others of its replica must end by themselves."""
    watch.pause(fault.seconds)
    victim, rank = fault.draw_victim(watch), fault.dice.randrange(watch.shape.ranks)
    watch.run.signal(victim, signal.SIGKILL, rank=rank)
    _killed(watch, fault, victim, time.time(), kills_others=False)


def _kill_donor(watch: Watch, fault: Fault) -> None:
    """Kill a replica from which another one, that joins, copies the state."""
    joiner, trigger = f"x{fault.number}", watch.folder / "triggers" / "any" / fault.place
    _set(watch, fault, trigger)
    watch.start(joiner)
    hit = _await_hit(watch, fault, trigger)
    _killed(watch, fault, hit["name"], hit["time"])
    _stay_and_leave(watch, fault, joiner)


def _killed(
    watch: Watch, fault: Fault, victim: str, when: float, *, kills_others: bool = True
) -> None:
    """Note that a replica was killed; wait until it has ended, and was started again."""
    fault.victim, fault.began = victim, when
    watch.note("down", victim, when)
    watch.expect_end(victim, {KILLED, FENCED}, fault.restart)
    if kills_others:
        watch.run.signal(victim, signal.SIGKILL)
    _await_restart(watch, fault)


# ---- replicas are frozen, leave, or join


def _freeze_short(watch: Watch, fault: Fault) -> None:
    """Freeze a replica for less time than it takes to be taken for lost."""
    victim = fault.draw_victim(watch)
    watch.run.signal(victim, signal.SIGSTOP)
    watch.note("freeze", victim)
    watch.pause(fault.seconds)
    watch.run.signal(victim, signal.SIGCONT)
    watch.note("thaw", victim)
    fault.ended = time.time()


def _freeze_long(watch: Watch, fault: Fault) -> None:
    """Freeze a replica until it is taken for lost; thawed, it must end."""
    victim = fault.draw_victim(watch)
    watch.run.signal(victim, signal.SIGSTOP)
    watch.note("down", victim)
    watch.wait(lambda: watch.events_after("leave", fault.began, name=victim), EVICT_SECONDS,
               f"frozen {victim} is not taken for lost")  # fmt: skip
    watch.pause(fault.seconds)
    watch.expect_end(victim, {FENCED}, fault.restart)
    watch.run.signal(victim, signal.SIGCONT)
    _await_restart(watch, fault)


def _term(watch: Watch, fault: Fault) -> None:
    """Ask a replica to end, and give it the time for it."""
    watch.pause(fault.seconds)
    victim, fault.began = fault.draw_victim(watch), time.time()
    _leave(watch, victim, fault.restart)
    if not watch.events_after("leave", fault.began, name=victim, reason="signal"):
        watch.problems.append(f"{victim} was asked to leave, and the journal has no such line")
    _await_restart(watch, fault)


def _term_kill(watch: Watch, fault: Fault) -> None:
    """Ask a replica to end, and kill it soon after."""
    victim = fault.draw_victim(watch)
    watch.note("down", victim)
    watch.expect_end(victim, {0, KILLED, FENCED}, fault.restart)
    watch.run.signal(victim, signal.SIGTERM)
    watch.pause(fault.seconds)
    watch.run.signal(victim, signal.SIGKILL)
    _await_restart(watch, fault)


def _join(watch: Watch, fault: Fault) -> None:
    """Let a replica with a new name join, take part for a while, and leave."""
    fault.victim, fault.ended = f"x{fault.number}", fault.began
    watch.start(fault.victim)
    _stay_and_leave(watch, fault, fault.victim)


def _stay_and_leave(watch: Watch, fault: Fault, joiner: str) -> None:
    watch.wait_until_whole(fault.ended, joiner)
    watch.pause(fault.seconds)
    _leave(watch, joiner)
    fault.ended = time.time()


def _leave(watch: Watch, name: str, restart: float | None = None) -> None:
    """Ask a replica to end, and wait for it."""
    watch.note("down", name)
    watch.expect_end(name, {0}, restart)
    watch.run.signal(name, signal.SIGTERM)
    watch.wait(lambda: watch.has_ended(name), LEAVE_SECONDS, f"{name} has not ended")
    watch.supervise()


# ---- hub, and bits


def _kill_hub(watch: Watch, fault: Fault) -> None:
    """Kill the hub, and start it again."""
    watch.is_hub_wanted = False
    watch.run.signal_hub(signal.SIGKILL)
    watch.pause(fault.seconds)
    watch.start_hub()
    fault.ended = time.time()


def _freeze_hub(watch: Watch, fault: Fault) -> None:
    """Freeze the hub for a while."""
    watch.run.signal_hub(signal.SIGSTOP)
    watch.pause(fault.seconds)
    watch.run.signal_hub(signal.SIGCONT)
    fault.ended = time.time()


def _flip_lasting(watch: Watch, fault: Fault) -> None:
    """Flip a bit of what a replica holds for long: it must be found out, and end."""
    trigger = _trigger_of_victim(watch, fault)
    watch.expect_end(fault.victim, {DRIFT}, fault.restart)
    fault.began = _hit(watch, fault, trigger)["time"]
    watch.note("down", fault.victim, fault.began)
    _await_restart(watch, fault)
    if not watch.events_after("leave", fault.began, name=fault.victim, reason="drifted"):
        watch.problems.append(f"a bit of {fault.victim} was flipped, and the journal has no line")


def _flip_passing(watch: Watch, fault: Fault) -> None:
    """Flip a bit of what a replica sends, or of an average: the exchange must be repeated."""
    fault.began = _hit(watch, fault, _trigger_of_victim(watch, fault))["time"]

    def next_events() -> list[dict[str, Any]]:
        events = (watch.events_after(kind, fault.began) for kind in ("commit", "epoch"))
        return sorted((line for each in events for line in each), key=lambda line: line["seq"])

    found = watch.wait(next_events, HIT_SECONDS, "an exchange with a flipped bit is not repeated")
    if found[0]["event"] == "commit":
        watch.problems.append(f"a round was committed with a flipped bit of {fault.victim}")
    fault.ended = time.time()


# ---- parts of the above


def _trigger_of_victim(watch: Watch, fault: Fault) -> Path:
    """Draw victim and rank; return the file that makes the rank fail at the place."""
    victim, rank = fault.draw_victim(watch), fault.dice.randrange(watch.shape.ranks)
    if fault.place in ("arrived", "ready"):
        rank = 0  # it speaks with the hub
    return watch.folder / "triggers" / victim / f"{fault.place}.{rank}"


def _hit(watch: Watch, fault: Fault, trigger: Path) -> dict[str, Any]:
    """Set a trigger; return who has come to its place, and when."""
    _set(watch, fault, trigger)
    return _await_hit(watch, fault, trigger)


def _set(watch: Watch, fault: Fault, trigger: Path) -> None:
    """Set a trigger of the hooks."""
    _hit_file(watch, fault).unlink(missing_ok=True)
    trigger.parent.mkdir(exist_ok=True)
    dice = fault.dice
    about = {"unit": dice.random(), "element": dice.random(), "bit": dice.randint(*BITS)}
    new = trigger.with_name(f".new-{trigger.name}")
    new.write_text(json.dumps(about))
    new.rename(trigger)


def _await_hit(watch: Watch, fault: Fault, trigger: Path) -> dict[str, Any]:
    """Return who has come to a place, and when. Nobody is supervised meanwhile: the end of the
    victim is expected only when it is known who it is."""
    until, path = time.monotonic() + HIT_SECONDS, _hit_file(watch, fault)
    while not path.exists():
        if time.monotonic() > until:
            trigger.unlink(missing_ok=True)
            raise HangError(f"nobody comes to {fault.place} after {HIT_SECONDS:.0f} s")
        time.sleep(HIT_POLL_SECONDS)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _hit_file(watch: Watch, fault: Fault) -> Path:
    return watch.folder / "hits" / f"{fault.place}.json"


def _await_restart(watch: Watch, fault: Fault) -> None:
    """Wait until the victim has ended, if it has not, and was started again."""
    name, count = fault.victim, len(watch.run.starts[fault.victim])
    watch.wait(
        lambda: watch.has_ended(name) or len(watch.run.starts[name]) > count,
        LEAVE_SECONDS, f"{name} has not ended",
    )  # fmt: skip
    watch.wait(lambda: not watch.has_ended(name), LEAVE_SECONDS, f"{name} was not started")
    fault.ended = time.time()


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        make: makes it.
        share: how many of 60 faults are of this kind.
        places: in the victim, which take turns; see `hooks`.
        seconds: range of its length.
    """

    make: Callable[[Watch, Fault], None]
    share: int
    places: tuple[str, ...] = ("",)
    seconds: tuple[float, float] = (0.0, 0.0)


KINDS = {
    "hub-kill": Kind(_kill_hub, 10, seconds=(0.0, 3.0)),
    "kill-train": Kind(_kill_at_place, 4, ("train",)),
    "kill-gather": Kind(_kill_at_place, 4, ("late", "arrived", "records")),
    "kill-exchange": Kind(_kill_at_place, 5, ("exchange", "result", "ready", "commit")),
    "kill-save": Kind(_kill_saving, 4, ("save-begin", "save-end", "save-commit")),
    "kill-leader": Kind(_kill_leader, 4, seconds=(0.0, 2.0)),
    "kill-rank": Kind(_kill_rank, 4, seconds=(0.0, 2.0)),
    "freeze-short": Kind(_freeze_short, 4, seconds=(1.0, 6.0)),
    "kill-donor": Kind(_kill_donor, 3, ("copy",), (1.0, 4.0)),
    "freeze-long": Kind(_freeze_long, 3, seconds=(0.0, 4.0)),
    "term": Kind(_term, 3, seconds=(0.0, 2.0)),
    "term-kill": Kind(_term_kill, 3, seconds=(0.0, 0.3)),
    "join": Kind(_join, 3, seconds=(1.0, 6.0)),
    "flip": Kind(_flip_lasting, 2, ("flip-anchor", "flip-momentum")),
    "flip-sent": Kind(_flip_passing, 2, ("flip-average", "flip-sent")),
    "hub-freeze": Kind(_freeze_hub, 2, seconds=(2.0, 12.0)),
}
