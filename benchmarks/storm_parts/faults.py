"""Makes one fault of a storm, and waits until the run is whole again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .tape import Fault
from .watch import KILLED, HangError, Watch

HIT_SECONDS = 60.0  # until a process comes to a place
HIT_POLL_SECONDS = 0.01
EVICT_SECONDS = 60.0  # until a frozen replica is taken for lost
LEAVE_SECONDS = 30.0  # from SIGTERM, or from the hub's last word, to the end of the process
FENCED, DRIFT = 5, 3


@dataclass
class Done:
    """A fault that was made.

    Attributes:
        number, kind, place: of the fault.
        part: of the storm.
        victim: name of the replica; empty for the hub.
        began: when it was made, in seconds since 1970.
        ended: when everything was running again that the fault had stopped.
        whole: when the run was whole again; None where it was not in time.
        problem: what went wrong; empty for nothing.
        load: of the machine when it was made: processes that ran or waited for a core.
    """

    number: int
    kind: str
    place: str
    part: int
    victim: str = ""
    began: float = 0.0
    ended: float = 0.0
    whole: float | None = None
    problem: str = ""
    load: float = 0.0


def make(watch: Watch, fault: Fault, part: int) -> Done:
    """Make a fault; what went wrong is in the result, and in the problems of the run."""
    now, load = time.time(), os.getloadavg()[0]
    done = Done(fault.number, fault.kind, fault.place, part, began=now, load=load)
    num_problems = len(watch.problems)
    try:
        MAKERS[fault.kind](watch, fault, done)
        watch.wait_until_whole(done.ended)
        done.whole = time.time()
    except HangError as error:
        done.problem = f"hang: {error}"
        watch.problem("hang", f"fault {fault.number} ({fault.kind} {fault.place}): {error}")
        watch.dump(f"hang-{fault.number}.txt")
    if not done.problem and len(watch.problems) > num_problems:
        done.problem = watch.problems[num_problems]
    return done


# ---- replicas are killed


def _kill_at_place(watch: Watch, fault: Fault, done: Done) -> None:
    """Kill a replica at a place inside of it."""
    victim, rank = _victim(watch, fault), _rank(watch, fault)
    if fault.place in ("arrived", "ready"):
        rank = 0  # it speaks with the hub
    trigger = watch.folder / "triggers" / victim / f"{fault.place}.{rank}"
    hit = _hit(watch, fault, trigger)
    _killed(watch, fault, done, hit["name"], hit["time"])


def _kill_saving(watch: Watch, fault: Fault, done: Done) -> None:
    """Kill the replica that writes a checkpoint."""
    hit = _hit(watch, fault, watch.folder / "triggers" / "any" / fault.place)
    _killed(watch, fault, done, hit["name"], hit["time"])


def _kill_leader(watch: Watch, fault: Fault, done: Done) -> None:
    watch.pause(fault.seconds)
    leader = watch.leader
    watch.run.signal(leader, signal.SIGKILL)
    _killed(watch, fault, done, leader, time.time())


def _kill_rank(watch: Watch, fault: Fault, done: Done) -> None:
    """Kill one rank at any time; the others of its replica must end by themselves."""
    watch.pause(fault.seconds)
    victim = _victim(watch, fault)
    watch.run.signal(victim, signal.SIGKILL, rank=_rank(watch, fault))
    _killed(watch, fault, done, victim, time.time(), kills_others=False)


def _kill_donor(watch: Watch, fault: Fault, done: Done) -> None:
    """Kill a replica from which another one, that joins, copies the state."""
    joiner = f"x{fault.number}"
    trigger = watch.folder / "triggers" / "any" / fault.place
    _set(watch, fault, trigger)
    watch.start(joiner)
    hit = _await_hit(watch, fault, trigger)
    _killed(watch, fault, done, hit["name"], hit["time"])
    watch.wait_until_whole(done.ended, joiner)
    watch.pause(fault.seconds)
    _leave(watch, joiner)
    done.ended = time.time()


def _killed(
    watch: Watch, fault: Fault, done: Done, victim: str, when: float, *, kills_others: bool = True
) -> None:
    """Note that a replica was killed; wait until it has ended, and was started again."""
    done.victim, done.began = victim, when
    watch.note("down", victim, when, fault=fault.number)
    watch.expect_end(victim, {KILLED, FENCED}, fault.restart)
    if kills_others:
        watch.run.signal(victim, signal.SIGKILL)
    _await_end(watch, victim)
    _await_start(watch, victim, done)


# ---- replicas are frozen, or leave


def _freeze_short(watch: Watch, fault: Fault, done: Done) -> None:
    """Freeze a replica for less time than it takes to be taken for lost."""
    victim = done.victim = _victim(watch, fault)
    watch.run.signal(victim, signal.SIGSTOP)
    done.began = time.time()
    watch.note("freeze", victim, done.began, fault=fault.number)
    watch.pause(fault.seconds)
    watch.run.signal(victim, signal.SIGCONT)
    watch.note("thaw", victim)
    done.ended = time.time()


def _freeze_long(watch: Watch, fault: Fault, done: Done) -> None:
    """Freeze a replica until it is taken for lost; thawed, it must end."""
    victim = done.victim = _victim(watch, fault)
    watch.run.signal(victim, signal.SIGSTOP)
    done.began = time.time()
    watch.note("down", victim, done.began, fault=fault.number)

    def is_out() -> bool:
        return bool(watch.events_after("leave", done.began, name=victim))

    watch.wait(is_out, EVICT_SECONDS, f"frozen {victim} is not taken for lost")
    watch.pause(fault.seconds)
    watch.expect_end(victim, {FENCED}, fault.restart)
    watch.run.signal(victim, signal.SIGCONT)
    _await_end(watch, victim)
    _await_start(watch, victim, done)


def _term(watch: Watch, fault: Fault, done: Done) -> None:
    """Ask a replica to end, and give it the time for it."""
    watch.pause(fault.seconds)
    victim = done.victim = _victim(watch, fault)
    done.began = time.time()
    _leave(watch, victim, fault.restart)
    if not watch.events_after("leave", done.began, name=victim, reason="signal"):
        text = f"{victim} was asked to leave, and the journal has no such line"
        watch.problem("journal", text)
    _await_start(watch, victim, done)


def _term_kill(watch: Watch, fault: Fault, done: Done) -> None:
    """Ask a replica to end, and kill it soon after."""
    victim = done.victim = _victim(watch, fault)
    done.began = time.time()
    watch.note("down", victim, done.began, fault=fault.number)
    watch.expect_end(victim, {0, KILLED, FENCED}, fault.restart)
    watch.run.signal(victim, signal.SIGTERM)
    watch.pause(fault.seconds)
    watch.run.signal(victim, signal.SIGKILL)
    _await_end(watch, victim)
    _await_start(watch, victim, done)


def _join(watch: Watch, fault: Fault, done: Done) -> None:
    """Let a replica with a new name join, take part for a while, and leave."""
    joiner = done.victim = f"x{fault.number}"
    done.began = time.time()
    watch.start(joiner)
    watch.wait_until_whole(done.began, joiner)
    watch.pause(fault.seconds)
    _leave(watch, joiner)
    done.ended = time.time()


def _leave(watch: Watch, name: str, restart: float | None = None) -> None:
    """Ask a replica to end, and wait for it."""
    watch.note("down", name)
    watch.expect_end(name, {0}, restart)
    watch.run.signal(name, signal.SIGTERM)
    _await_end(watch, name)
    watch.supervise()


# ---- hub, and bits


def _kill_hub(watch: Watch, fault: Fault, done: Done) -> None:
    """Kill the hub, and start it again."""
    watch.is_hub_wanted = False
    watch.run.signal_hub(signal.SIGKILL)
    done.began = time.time()
    watch.pause(fault.seconds)
    watch.start_hub()
    done.ended = time.time()


def _freeze_hub(watch: Watch, fault: Fault, done: Done) -> None:
    """Freeze the hub for a while."""
    watch.run.signal_hub(signal.SIGSTOP)
    done.began = time.time()
    watch.pause(fault.seconds)
    watch.run.signal_hub(signal.SIGCONT)
    done.ended = time.time()


def _flip(watch: Watch, fault: Fault, done: Done) -> None:
    """Flip a bit of one replica before a commit. In what it holds for long, it must be found out
    and end; in what it sends, or an average, of one exchange, the exchange must be repeated."""
    victim = done.victim = _victim(watch, fault)
    is_lasting = fault.place not in ("flip-average", "flip-sent")
    if is_lasting:
        watch.expect_end(victim, {DRIFT}, fault.restart)
    trigger = watch.folder / "triggers" / victim / f"{fault.place}.{_rank(watch, fault)}"
    hit = _hit(watch, fault, trigger)
    done.began = hit["time"]
    if is_lasting:
        watch.note("down", victim, done.began, fault=fault.number)
        _await_end(watch, victim)
        if not watch.events_after("leave", done.began, name=victim, reason="drifted"):
            text = f"a bit of {victim} was flipped, and the journal has no such line"
            watch.problem("journal", text)
        _await_start(watch, victim, done)
        return

    def is_repeated() -> bool:
        commits = watch.events_after("commit", done.began)
        epochs = watch.events_after("epoch", done.began)
        if commits and not (epochs and epochs[0]["seq"] < commits[0]["seq"]):
            watch.problem("journal", f"a round was committed with a flipped bit of {victim}")
            return True
        return bool(epochs)

    watch.wait(is_repeated, HIT_SECONDS, "an exchange with a flipped bit is not repeated")
    done.ended = time.time()


# ---- parts of the above


def _victim(watch: Watch, fault: Fault) -> str:
    names = watch.shape.names
    return names[int(fault.victim * len(names))]


def _rank(watch: Watch, fault: Fault) -> int:
    return int(fault.rank * watch.shape.ranks)


def _set(watch: Watch, fault: Fault, trigger: Path) -> None:
    """Set a trigger of the hooks."""
    _hit_file(watch, fault).unlink(missing_ok=True)
    trigger.parent.mkdir(exist_ok=True)
    about = {"unit": fault.unit, "element": fault.element, "bit": fault.bit}
    new = trigger.with_name(f".new-{trigger.name}")
    new.write_text(json.dumps(about))
    new.rename(trigger)


def _hit(watch: Watch, fault: Fault, trigger: Path) -> dict[str, Any]:
    """Set a trigger; who has come to its place, and when."""
    _set(watch, fault, trigger)
    return _await_hit(watch, fault, trigger)


def _await_hit(watch: Watch, fault: Fault, trigger: Path) -> dict[str, Any]:
    """Who has come to a place, and when. Nobody is supervised meanwhile: the end of the victim is
    expected only when it is known who it is."""
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


def _await_end(watch: Watch, name: str) -> None:
    seconds = LEAVE_SECONDS
    watch.wait(lambda: watch.has_ended(name), seconds, f"{name} has not ended")


def _await_start(watch: Watch, name: str, done: Done) -> None:
    watch.wait(lambda: not watch.has_ended(name), 30.0, f"{name} was not started")
    done.ended = time.time()


Maker = Callable[[Watch, Fault, Done], None]
MAKERS: dict[str, Maker] = {
    "kill-train": _kill_at_place,
    "kill-gather": _kill_at_place,
    "kill-exchange": _kill_at_place,
    "kill-save": _kill_saving,
    "kill-leader": _kill_leader,
    "kill-rank": _kill_rank,
    "kill-donor": _kill_donor,
    "freeze-short": _freeze_short,
    "freeze-long": _freeze_long,
    "term": _term,
    "term-kill": _term_kill,
    "join": _join,
    "hub-kill": _kill_hub,
    "hub-freeze": _freeze_hub,
    "flip": _flip,
}
