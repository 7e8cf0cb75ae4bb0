"""What runs inside the replicas of a storm, before the launcher attaches the plugin.

A step lasts `STORM_STEP` seconds, most of them sleep. A fault at a place inside the replica waits
for a trigger: a file `triggers/REPLICA/PLACE.RANK`, or `triggers/any/PLACE` for the first process
that comes there. Whoever renames the file makes the fault, and notes it in `hits/PLACE.json`.

| place | what the process does there |
|---|---|
| train | is killed before an optimizer step |
| late | is killed at the meeting before it arrives, while the others wait |
| arrived | is killed when it has arrived |
| records | is killed when the hub lets it exchange, before the records |
| exchange | is killed when the exchange of parameters has begun |
| result | is killed when it has the complete result, before it reports it |
| ready | is killed when it has reported the result |
| commit | is killed when it knows of the commit, before it applies it |
| save-begin, save-end | is killed before, or after, it has written its files of a checkpoint |
| save-commit | is killed when it has read them back, before the checkpoint gets its name |
| copy | is killed while another replica copies its state |
| flip-anchor, flip-momentum, flip-average | flips one bit, before a commit |
| flip-sent | flips the highest bit of an exponent in what it sends: all get a wrong average |
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from functools import cache, wraps
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.host.spy import built_chunks, parameter_digest

LATE_SECONDS = 0.5  # that the others wait for one that is killed before it arrives
SENT_SECONDS = 0.1  # in which the agent's thread has sent a report
HIGHEST_OF_EXPONENT = 30  # bit of a float32
READS_OF_COPY, FATAL_READ = 8, 4  # reads of a copy: four units; and the one in mid-copy


def install() -> None:
    """Hook everything."""
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    _record_digest()
    _pad_steps(float(os.environ["STORM_STEP"]))
    _hook_meetings()
    _hook_attempts()
    _hook_reports()
    _hook_saves()
    _hook_copies()


# ---- triggers


def _claim(place: str) -> dict[str, Any] | None:
    """Take the trigger of a place; what it says, or None where there is none."""
    folder, name = _folder() / "triggers", _name()
    for path in (folder / name / f"{place}.{_rank()}", folder / "any" / place):
        claimed = path.with_name(f".{path.name}.{name}.{_rank()}")
        try:
            path.rename(claimed)
        except OSError:
            continue
        found: dict[str, Any] = json.loads(claimed.read_text())
        return found
    return None


def _note_hit(place: str) -> None:
    """Write down that this process makes the fault of a place, and when."""
    hit = {"name": _name(), "rank": _rank(), "time": time.time()}
    new = _folder() / "hits" / f".{place}.{os.getpid()}"
    new.write_text(json.dumps(hit))
    new.rename(_folder() / "hits" / f"{place}.json")


def _die(place: str) -> NoReturn:
    _note_hit(place)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed")


def _kill_at(place: str, *, after: float = 0.0) -> None:
    """Kill this process, where there is a trigger for this place, after some seconds."""
    if _claim(place) is not None:
        time.sleep(after)
        _die(place)


@cache
def _folder() -> Path:
    return Path(os.environ["STORM_DIR"])


@cache
def _name() -> str:
    return Path(os.environ["SPY_DIR"]).name.removeprefix("spy-")


@cache
def _rank() -> int:
    return int(os.environ["RANK"])


# ---- places


def _pad_steps(seconds: float) -> None:
    """Make each step as long as planned: what it does not compute, it sleeps."""
    import megatron.training.training as training

    from megatron_edit.engine import EditEngine

    train_step, before_step = training.train_step, EditEngine.before_step
    began = [0.0]

    @wraps(train_step)
    def marked(*args: Any, **kwargs: Any) -> Any:
        began[0] = _computed_seconds()
        return train_step(*args, **kwargs)

    def padded(self: EditEngine) -> None:
        time.sleep(max(0.0, seconds - (_computed_seconds() - began[0])))
        _kill_at("train")
        before_step(self)

    training.train_step = marked
    EditEngine.before_step = padded  # type: ignore[method-assign]


def _record_digest() -> None:
    """Write a digest of the parameters when training ends."""
    import megatron.training.training as training

    chunks, train = built_chunks(), training.train

    @wraps(train)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        try:
            return train(*args, **kwargs)
        finally:
            path = Path(os.environ["SPY_DIR"]) / f"digest-{_rank()}.json"
            path.write_text(json.dumps(parameter_digest(chunks)))

    training.train = recorded


def _computed_seconds() -> float:
    """Seconds that this thread has run or waited for a core, since its start."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran) + int(waited)) / 1e9


def _hook_meetings() -> None:
    from megatron_edit.engine.membership import Membership
    from megatron_edit.engine.rounds.elastic import ElasticRounds

    open_round, turn, meet = Membership.open_round, Membership.turn, ElasticRounds.meet

    def opened(self: Membership, begin: Any, copy: Any, steps: int | None) -> None:
        def begun(go: Any) -> Any:
            _kill_at("records")
            return begin(go)

        _kill_at("late", after=LATE_SECONDS)
        open_round(self, begun, copy, steps)

    def turned(self: Membership, *, waits: bool) -> Any:
        if (found := turn(self, waits=waits)) is not None:
            _kill_at("commit")
        return found

    def met(self: ElasticRounds, meeting: Any) -> bool:
        for kind in ("anchor", "momentum"):
            if (where := _claim(f"flip-{kind}")) is not None:
                units = list(self.syncs.outer.units.values())
                unit = units[int(where["unit"] * len(units))]
                _flip(getattr(unit, kind), where)
                _note_hit(f"flip-{kind}")
        return meet(self, meeting)

    Membership.open_round = opened  # type: ignore[method-assign]
    Membership.turn = turned  # type: ignore[method-assign]
    ElasticRounds.meet = met  # type: ignore[method-assign]


def _hook_attempts() -> None:
    from megatron_edit.engine.rounds.elastic import RoundAttempt
    from megatron_edit.engine.sync.manager import SyncManager
    from megatron_edit.engine.sync.syncs import CheckedSync

    advance, result, preview = RoundAttempt.advance, RoundAttempt.result, CheckedSync.preview
    start = SyncManager.start

    def advanced(self: RoundAttempt) -> bool:
        is_done = advance(self)
        if self.sync is not None:
            _kill_at("exchange")
        return is_done

    def started(self: SyncManager, sync: Any) -> None:
        sent = [unit.average for unit in sync.inflight_units if not unit.is_excluded]
        if sent and (where := _claim("flip-sent")) is not None:
            _flip(sent[int(where["unit"] * len(sent))], {**where, "bit": HIGHEST_OF_EXPONENT})
            _note_hit("flip-sent")
        start(self, sync)

    def resulted(self: RoundAttempt, epoch: int) -> Any:
        found = result(self, epoch)
        _kill_at("result")
        return found

    def previewed(self: CheckedSync) -> Any:
        if (where := _claim("flip-average")) is not None:
            units = [unit for unit in self.inflight_units if unit.average is not None]
            average = units[int(where["unit"] * len(units))].average
            assert average is not None
            _flip(average, where)
            _note_hit("flip-average")
        return preview(self)

    SyncManager.start = started  # type: ignore[method-assign]
    RoundAttempt.advance = advanced  # type: ignore[method-assign]
    RoundAttempt.result = resulted  # type: ignore[method-assign]
    CheckedSync.preview = previewed  # type: ignore[method-assign]


def _flip(tensor: torch.Tensor, where: dict[str, Any]) -> None:
    """Flip one bit of a tensor."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[int(where["element"] * bits.numel())] ^= 1 << where["bit"]


def _hook_reports() -> None:
    from megatron_edit.elastic.agent import Agent
    from megatron_edit.elastic.replica import Exchanged, RoundDue

    report = Agent.report
    places: dict[type, str] = {RoundDue: "arrived", Exchanged: "ready"}

    def reported(self: Agent, what: Any) -> None:
        report(self, what)
        if (place := places.get(type(what))) is not None:
            _kill_at(place, after=SENT_SECONDS)

    Agent.report = reported  # type: ignore[method-assign]


def _hook_saves() -> None:
    import megatron.training.training as training

    from megatron_edit.checkpoint.folder import CheckpointFolder

    save, commit = training.save_checkpoint, CheckpointFolder.commit

    @wraps(save)
    def saved(*args: Any, **kwargs: Any) -> Any:
        _kill_at("save-begin")
        found = save(*args, **kwargs)
        _kill_at("save-end")
        return found

    def committed(self: CheckpointFolder, *args: Any) -> Any:
        _kill_at("save-commit")
        return commit(self, *args)

    training.save_checkpoint = saved
    CheckpointFolder.commit = committed  # type: ignore[method-assign, assignment]


def _hook_copies() -> None:
    from megatron_edit.engine.shared_state import SharedState

    read = SharedState.read
    reads = [0]

    def counted(self: SharedState, *args: Any) -> Any:
        reads[0] += 1
        if reads[0] % READS_OF_COPY == FATAL_READ:
            _kill_at("copy")
        return read(self, *args)

    SharedState.read = counted  # type: ignore[method-assign, assignment]
