"""A model of how a device with few hardware queues executes the streams of all ranks.

A rank's commands are recorded, in launch order, while the real engine runs on stubs
(`traced_streams.py`). All ranks are then replayed together:

* streams map to hardware queues round robin; a queue takes its commands in the order in which they
  were launched, and a command with a pending dependency blocks all commands behind it. As far as is
  known, `CUDA_DEVICE_MAX_CONNECTIONS` works like that: this is a model, not a measurement;
* a command taken from a queue runs on its stream, concurrently with other streams;
* a collective begins when all its ranks have reached it;
* hosts wait for events and for each other, and otherwise take no time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.harness.traced_streams import InOrderGroup, TracedStreams

LAUNCH = 1e-4  # seconds per kernel of the engine
COMPUTE = 0


@dataclass(frozen=True)
class Command:
    """An operation that a host launches, or waits for.

    Attributes:
        kind: "kernel", "wait", "record", "collective"; of the host: "synchronize", "meet".
        stream: stream on which it is launched.
        seconds: duration.
        event: event that it waits for, or records.
        group: name of the group of a collective.
        number: number of a collective or meeting within its group.
        is_host_framework: whether the training framework launched it, not the engine.
        operation: PyTorch's name of the operation, for a kernel of the engine.
    """

    kind: str
    stream: int = COMPUTE
    seconds: float = 0.0
    event: int = 0
    group: str = ""
    number: int = 0
    is_host_framework: bool = False
    operation: str = ""


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Records the commands that one rank launches.

    Args:
        seconds_of: returns the time of a collective from its group's name and bytes.
        lag_seconds: time of the framework's compute after which an event counts as done.

    Attributes:
        commands: commands so far.
        streams: streams for the rank.
    """

    def __init__(self, seconds_of: Callable[[str, int], float], lag_seconds: float) -> None:
        super().__init__()
        self.commands: list[Command] = []
        self.streams = TracedStreams(self)
        self._seconds_of, self._lag_seconds = seconds_of, lag_seconds
        self._computed, self._recorded_at = 0.0, dict[int, float]()
        self._framework, self._is_muted, self._num_meetings = False, False, 0

    def _note(self, kind: str, stream: int = COMPUTE, **rest: Any) -> None:
        self.commands.append(Command(kind, stream, is_host_framework=self._framework, **rest))

    @contextmanager
    def framework(self) -> Iterator[None]:
        """Record launches as the framework's inside this context: `kernel` and collectives only."""
        before, self._framework = self._framework, True
        yield
        self._framework = before

    def kernel(self, seconds: float) -> None:
        """Record compute of the training framework on the current stream."""
        self._computed += seconds
        with self.framework():
            self._note("kernel", self.streams.current(), seconds=seconds)

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Record a meeting: hosts wait for their devices' norms, then for each other."""
        self._num_meetings += 1
        self.streams.synchronize(self.streams.record(self.streams.current()))
        self._note("meet", group="sync", number=self._num_meetings)
        yield

    def on_new(self, stream: int) -> None:
        """See `Listener`."""

    def on_record(self, event: int, stream: int | None) -> None:
        """See `Listener`."""
        assert stream is not None
        self._recorded_at[event] = self._computed
        self._note("record", stream, event=event)

    def on_wait(self, stream: int, event: int) -> None:
        """See `Listener`."""
        self._note("wait", stream, event=event)

    def on_keep(self, tensor: Tensor, stream: int) -> None:
        """See `Listener`."""

    def on_synchronize(self, event: int) -> None:
        """See `Listener`."""
        self._note("synchronize", event=event)

    def is_done(self, event: int) -> bool:
        """See `Listener`: the host is ahead of the device by at most `lag_seconds`."""
        return self._computed - self._recorded_at[event] >= self._lag_seconds

    @contextmanager
    def collective(self, group: InOrderGroup, nbytes: int) -> Iterator[None]:
        """See `Listener`."""
        self._note(
            "collective",
            group.stream,
            seconds=self._seconds_of(group.name_, nbytes),
            group=group.name_,
            number=group.num_launched,
        )
        before, self._is_muted = self._is_muted, True
        yield
        self._is_muted = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record a kernel of the engine, except views, allocations and profiler marks."""
        result = func(*args, **(kwargs or {}))
        is_view = all(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        operation = func._schema.name
        is_launched = not is_view and not operation.startswith(("aten::empty", "profiler::"))
        if is_launched and not self._is_muted and not self._framework:
            stream = self.streams.current()
            self._note("kernel", stream, seconds=LAUNCH, operation=operation)
        return result


@dataclass(eq=False, repr=False)
class Running:
    """A command that was launched on a device and may be pending."""

    command: Command
    launched: float
    before: Running | None  # previous command on its stream
    event: Running | None = None  # command whose event it waits for
    end: float | None = None


@dataclass(repr=False)
class Device:
    """The state of one rank in a replay."""

    commands: Sequence[Command]
    num_queues: int
    place: int = 0
    host_seconds: float = 0.0
    queues: dict[int, deque[Running]] = field(default_factory=lambda: defaultdict(deque))
    taken: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    tails: dict[int, Running] = field(default_factory=dict)
    events: dict[int, Running | None] = field(default_factory=dict)
    collective: Running | None = None  # the last one

    @property
    def is_over(self) -> bool:
        """Whether all commands were launched and taken from the queues."""
        return self.place == len(self.commands) and not any(self.queues.values())


class DeadlockError(Exception):
    """No rank can make progress."""


@dataclass(repr=False)
class Replay:
    """Replays the commands of all ranks together.

    Args:
        ranks: commands by rank.
        members: returns the ranks of a group from its name and one of its ranks.
        num_queues: number of hardware queues of a device.
        is_serial: whether a device runs one collective at a time, in the order in which they are
            taken from the queues, as where their launches are serialised.
    """

    ranks: Mapping[Any, Sequence[Command]]
    members: Callable[[str, Any], frozenset[Any]]
    num_queues: int
    is_serial: bool = False
    _arrived: dict[Any, dict[Any, float]] = field(default_factory=lambda: defaultdict(dict))
    _waiting: dict[Any, list[Running]] = field(default_factory=lambda: defaultdict(list))

    def seconds(self) -> float:
        """Return the time at which the last command is over.

        Raises:
            DeadlockError: the commands never finish.
        """
        devices = {rank: Device(commands, self.num_queues) for rank, commands in self.ranks.items()}
        has_moved = True
        while has_moved:
            has_moved = False
            for rank, device in devices.items():
                while self._launch(rank, device) or self._take(rank, device):
                    has_moved = True
        ends = [tail.end for device in devices.values() for tail in device.tails.values()]
        if None in ends or not all(device.is_over for device in devices.values()):
            raise DeadlockError(f"{self.num_queues} queues: " + self._stuck(devices))
        seconds = [device.host_seconds for device in devices.values()]
        return max(end for end in (*ends, *seconds) if end is not None)

    def _launch(self, rank: Any, device: Device) -> bool:
        """Execute the host's next command; return whether it could proceed."""
        if device.place == len(device.commands):
            return False
        command = device.commands[device.place]
        if command.kind == "record":
            device.events[command.event] = device.tails.get(command.stream)
        elif command.kind == "synchronize":
            event = device.events.get(command.event)
            if event is not None and event.end is None:
                return False
            device.host_seconds = max(device.host_seconds, 0.0 if event is None else event.end or 0)
        elif command.kind == "meet":
            arrived = self._arrived[self._key(rank, command, "meet")]
            arrived[rank] = device.host_seconds
            if len(arrived) < len(self.members(command.group, rank)):
                return False
            device.host_seconds = max(arrived.values())
        else:
            before = device.tails.get(command.stream)
            running = Running(command, device.host_seconds, before)
            running.event = device.events.get(command.event) if command.kind == "wait" else None
            device.tails[command.stream] = running
            device.queues[command.stream % device.num_queues].append(running)
        device.place += 1
        return True

    def _take(self, rank: Any, device: Device) -> bool:
        """Take ready commands from the heads of the queues; return whether there was one."""
        has_taken = False
        for number, queue in device.queues.items():
            if not queue:
                continue
            head, command = queue[0], queue[0].command
            needs = [need for need in (head.before, head.event) if need is not None]
            if self.is_serial and command.kind == "collective" and device.collective is not None:
                needs.append(device.collective)
            if any(need.end is None for need in needs):
                continue
            queue.popleft()
            has_taken = True
            began = max(device.taken[number], head.launched, *(n.end or 0.0 for n in needs), 0.0)
            device.taken[number] = began
            if command.kind != "collective":
                head.end = began + command.seconds
                continue
            device.collective = head
            key = self._key(rank, command, "collective")
            self._arrived[key][rank] = began
            self._waiting[key].append(head)
            if len(self._arrived[key]) == len(self.members(command.group, rank)):
                for running in self._waiting[key]:
                    running.end = max(self._arrived[key].values()) + command.seconds
        return has_taken

    def _key(self, rank: Any, command: Command, kind: str) -> Any:
        return kind, command.group, self.members(command.group, rank), command.number

    def _stuck(self, devices: Mapping[Any, Device]) -> str:
        heads = [
            f"rank {rank}: {queue[0].command.kind} {queue[0].command.group} on stream "
            f"{queue[0].command.stream}"
            for rank, device in devices.items()
            for queue in device.queues.values()
            if queue
        ]
        return "; ".join(heads)
