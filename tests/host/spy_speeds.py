"""Hooks for replicas at different speeds: slow them down, script their clocks, disturb them.

`SPY_HOOKS` names hooks, separated by commas, which `hooks` runs. Factors are by replica.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import wraps
from pkgutil import resolve_name
from threading import Timer
from typing import Any

from tests.host.spy import _replica, out_dir

STEP_NANOSECONDS = 1_000_000_000
_SCRIPTED = [0]  # nanoseconds that the scripted clock shows


def hooks() -> None:
    """Run all hooks that `SPY_HOOKS` names."""
    for name in os.environ["SPY_HOOKS"].split(","):
        globals()[name]()


def at_each_step(action: Any) -> None:
    """Call `action(step)` before each optimizer step, from 1 on."""
    from megatron_edit.engine import EditEngine

    before = EditEngine.before_step

    def acted(self: EditEngine) -> None:
        action(self.status.step + 1)
        before(self)

    EditEngine.before_step = acted  # type: ignore[method-assign]


def slow() -> None:
    """Sleep `SPY_SLEEP[replica]` seconds in each step."""
    seconds = json.loads(os.environ["SPY_SLEEP"])[_replica()]
    at_each_step(lambda step: time.sleep(seconds))


def script_clock() -> None:
    """Make a step of replica r last exactly `SPY_FACTORS[r]` seconds by the engine's clock.

    With `SPY_JITTER` that holds on rank 0 of the replica, and the other ranks' clocks run faster.
    Heartbeats come in real time, which has nothing to do with these clocks: what they tell about
    the arrival of other replicas is ignored.
    """
    from megatron_edit.comm.heartbeat import HeartbeatMonitor
    from megatron_edit.method.clock import PhaseClock

    HeartbeatMonitor.latest_arrival = lambda self: 0.0  # type: ignore[method-assign]
    factor, now = json.loads(os.environ["SPY_FACTORS"])[_replica()], _SCRIPTED
    ranks = int(os.environ["WORLD_SIZE"]) // int(os.environ["SPY_REPLICAS"])
    factor *= 1 + int(os.environ["RANK"]) % ranks * float(os.environ.get("SPY_JITTER", "0"))
    begin = PhaseClock.__post_init__

    def scripted(self: PhaseClock) -> None:
        self.read = lambda: now[0]
        begin(self)

    def tick(step: int) -> None:
        now[0] += int(factor * STEP_NANOSECONDS)

    PhaseClock.__post_init__ = scripted  # type: ignore[method-assign]
    at_each_step(tick)


def linger() -> None:
    """Make each call of the functions in `SPY_LINGER` take 100 s by the scripted clock."""

    def lingering(function: Any) -> Any:
        @wraps(function)
        def lingered(*args: Any, **kwargs: Any) -> Any:
            _SCRIPTED[0] += 100 * STEP_NANOSECONDS
            return function(*args, **kwargs)

        return lingered

    for name in os.environ["SPY_LINGER"].split(","):
        place, _, attribute = name.rpartition(".")
        owner = resolve_name(place)
        setattr(owner, attribute, lingering(getattr(owner, attribute)))


def shift_clocks() -> None:
    """Set the wall clock and the monotonic clock of replica 1 an hour forward."""
    if _replica() != 1:
        return
    from megatron_edit.method.clock import PhaseClock

    wall, monotonic, read = time.time, time.monotonic, time.monotonic_ns
    begin = PhaseClock.__post_init__

    def shifted(self: PhaseClock) -> None:
        self.read = lambda: read() + 3600 * STEP_NANOSECONDS
        begin(self)

    PhaseClock.__post_init__ = shifted  # type: ignore[method-assign]
    time.time = lambda: wall() + 3600
    time.monotonic = lambda: monotonic() + 3600


def on_replica_1(action: Any) -> None:
    """Call `action()` in the processes of replica 1, in step `SPY_STEP`."""
    is_victim = _replica() == 1

    def act(step: int) -> None:
        if is_victim and step == int(os.environ["SPY_STEP"]):
            action()

    at_each_step(act)


def signal_replica_1() -> None:
    """Send SIGTERM to replica 1 in step `SPY_STEP`."""
    on_replica_1(lambda: os.kill(os.getpid(), signal.SIGTERM))


def kill_replica_1() -> None:
    """Kill the process of replica 1 in step `SPY_STEP`."""
    on_replica_1(lambda: os.kill(os.getpid(), signal.SIGKILL))


def expire_replica_1() -> None:
    """Make the `--exit-duration-in-mins` of replica 1 elapse in step `SPY_STEP`."""

    def expire() -> None:
        import megatron.training.training as training

        training._TRAIN_START_TIME -= 3600

    on_replica_1(expire)


def signal_soon() -> None:
    """Send SIGTERM to replica 1 a second after it has begun step `SPY_STEP`."""
    script = "sleep 1; kill -TERM $0"
    on_replica_1(lambda: subprocess.Popen(["bash", "-c", script, str(os.getpid())]))


def expire_soon() -> None:
    """Make that duration elapse a second after replica 1 has begun step `SPY_STEP`."""

    def expire() -> None:
        import megatron.training.training as training

        training._TRAIN_START_TIME -= 3600

    on_replica_1(Timer(1, expire).start)


def freeze() -> None:
    """Stop this process permanently, until the test ends and kills it."""
    os.kill(os.getpid(), signal.SIGSTOP)


def hang_replica_1() -> None:
    """Make the main thread of replica 1 hang permanently while its other threads run on."""
    on_replica_1(lambda: time.sleep(3600))


def freeze_replica_1() -> None:
    """Freeze replica 1 in step `SPY_STEP`."""
    on_replica_1(freeze)


def freeze_in_evaluation() -> None:
    """Freeze replica 1 when it begins to evaluate."""
    in_evaluations(freeze)


def freeze_in_exchange() -> None:
    """Freeze replica 1 when it is about to send its first unit."""
    from megatron_edit.engine.sync.unit_sync import UnitSync

    if _replica() == 1:
        UnitSync.launch = lambda *_: freeze()  # type: ignore[method-assign]


def evaluate_slowly() -> None:
    """Make each batch of an evaluation take a second on replica 1."""
    in_evaluations(lambda: time.sleep(1))


def in_evaluations(action: Any) -> None:
    """Call `action()` before each forward step of an evaluation on replica 1."""
    import megatron.training.training as training

    evaluate = training.evaluate

    @wraps(evaluate)
    def acting(forward_step_func: Any, *args: Any, **kwargs: Any) -> Any:
        def acted(*batch: Any, **more: Any) -> Any:
            action()
            return forward_step_func(*batch, **more)

        return evaluate(acted, *args, **kwargs)

    if _replica() == 1:
        training.evaluate = acting


def pause_replica_1() -> None:
    """Stop the process of replica 1 for 10 seconds."""
    script = "kill -STOP $0; sleep 10; kill -CONT $0"
    on_replica_1(lambda: subprocess.Popen(["bash", "-c", script, str(os.getpid())]))


def record_consumed() -> None:
    """Write the sample indices that this rank's training consumed, by step."""
    from megatron_edit.host.assigned_data import AssignedLoader, AssignedSampler, ReorderedSampler

    rank, waiting, consumed = os.environ["RANK"], deque[list[int]](), list[list[int]]()
    load = AssignedLoader.__iter__

    def spied(sample: Callable[[Any], Iterator[list[int]]]) -> Any:
        def sampled(self: Any) -> Iterator[list[int]]:
            waiting.clear()  # batches that were read ahead and never delivered
            for indices in sample(self):
                waiting.append(indices)
                yield indices

        return sampled

    def spied_loader(self: AssignedLoader) -> Iterator[Any]:
        for batch in load(self):
            consumed.append(waiting.popleft())
            (out_dir() / f"consumed-{rank}.json").write_text(json.dumps(consumed))
            yield batch

    for sampler in (AssignedSampler, ReorderedSampler):  # of the rounds, of the final phase
        sampler.__iter__ = spied(sampler.__iter__)  # type: ignore[method-assign]
    AssignedLoader.__iter__ = spied_loader  # type: ignore[method-assign]


def record_spy() -> None:
    """Run `spy.record`, which records the final parameters, among others."""
    from tests.host.spy import record

    record()
