"""What the hub costs a replica without faults: measured in the ranks, and read from their files."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import wraps
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

from megatron_edit.atomic_files import write_atomic

AGENT_THREAD = "edit-hub"


@dataclass(frozen=True)
class MeetingTimes:
    """When a rank was where in a meeting, in seconds on the clock of the machine.

    Attributes:
        round: number of commits after it.
        arrived: before it reports that its round is due.
        begun: when the hub has let it exchange.
        exchanged: when it has all averages.
        committed: when it knows of the commit.
    """

    round: int
    arrived: float
    begun: float
    exchanged: float
    committed: float


@dataclass
class RankTimes:
    """What one rank has measured.

    Attributes:
        step: seconds of a step between two meetings.
        main: seconds of the main thread, per step, in what only a run with a hub does.
        agent: CPU seconds of the thread that speaks with the hub, per step; 0 on other ranks.
        meetings: all of them.
    """

    step: float
    main: float
    agent: float
    meetings: list[MeetingTimes]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file of a rank."""
        has = json.loads(path.read_text(encoding="utf-8"))
        return cls(**has | {"meetings": [MeetingTimes(**each) for each in has["meetings"]]})


@dataclass(frozen=True)
class Control:
    """What the hub costs in a run without faults.

    Attributes:
        step: seconds of a step; the median of the ranks.
        main, agent: see `RankTimes`; those of the replica whose sum is the largest.
        meetings: seconds of each round that are neither exchange nor waiting for a replica: from
            the last arrival until the last rank exchanges, and from the end of the exchange on the
            last rank until the last rank knows of the commit.
        exchanges: seconds of each round from the first rank that exchanges to the last one that
            has all averages.
    """

    step: float
    main: float
    agent: float
    meetings: tuple[float, ...]
    exchanges: tuple[float, ...]

    @property
    def share(self) -> float:
        """Control time of a step, as a share of the step."""
        return (self.main + self.agent) / self.step

    @classmethod
    def read(cls, folder: Path) -> Control | None:
        """What the ranks of a run in a folder have measured; None where they have not."""
        files = sorted(folder.glob("spy-*/control-*.json"))
        return cls.of([RankTimes.read(path) for path in files])

    @classmethod
    def of(cls, ranks: Sequence[RankTimes]) -> Control | None:
        """From the measurements of all ranks; None without any."""
        if not ranks:
            return None
        costs = max(((rank.main, rank.agent) for rank in ranks), key=sum)
        rounds: dict[int, list[MeetingTimes]] = {}
        for rank in ranks:
            for each in rank.meetings:
                rounds.setdefault(each.round, []).append(each)
        complete = [times for times in rounds.values() if len(times) == len(ranks)]
        return cls(
            median(rank.step for rank in ranks),
            *costs,
            tuple(_last(t, "begun") - _last(t, "arrived")
                  + _last(t, "committed") - _last(t, "exchanged") for t in complete),
            tuple(_last(t, "exchanged") - min(each.begun for each in t) for t in complete),
        )  # fmt: skip


def _last(times: Sequence[MeetingTimes], what: str) -> float:
    return float(max(getattr(each, what) for each in times))


# ---- in the ranks


@dataclass
class ControlMeter:
    """Measures on one rank, from the first step on.

    Attributes:
        seconds: of the main thread, in all steps but the first.
        begins: when each step was reported.
        agent: CPU seconds of the agent's thread at the first step, and at the last.
        meetings: all of them.
    """

    seconds: float = 0.0
    begins: list[float] = field(default_factory=list)
    agent: list[float] = field(default_factory=list)
    meetings: list[MeetingTimes] = field(default_factory=list)

    def install(self) -> None:
        """Hook steps, meetings and the end of training."""
        self._hook_steps()
        self._hook_meetings()
        self._hook_end()

    def _hook_steps(self) -> None:
        from megatron_edit.engine.rounds.elastic import ElasticRounds

        report = ElasticRounds.report_progress

        def timed(rounds: ElasticRounds, batches: int) -> None:
            began = time.monotonic()
            report(rounds, batches)
            self.seconds += time.monotonic() - began if self.begins else 0.0
            self.begins.append(began)
            self.agent[1:] = [_agent_seconds()]

        ElasticRounds.report_progress = timed  # type: ignore[method-assign, assignment]

    def _hook_meetings(self) -> None:
        from megatron_edit.engine.membership import Membership
        from megatron_edit.engine.rounds.elastic import RoundAttempt

        decide, advance = Membership.decide, RoundAttempt.advance
        times: dict[str, float] = {}

        def decided(membership: Membership, attempt: Any, copy: Any) -> Any:
            def begun() -> Any:
                times["begun"] = time.monotonic()
                return attempt()

            times["arrived"] = time.monotonic()
            made, is_last = decide(membership, begun, copy)
            number = made.plan.after.count  # type: ignore[attr-defined]
            self.meetings.append(MeetingTimes(number, committed=time.monotonic(), **times))
            return made, is_last

        def advanced(attempt: RoundAttempt) -> bool:
            is_over = advance(attempt)
            times["exchanged"] = time.monotonic()
            return is_over

        Membership.decide = decided  # type: ignore[method-assign, assignment]
        RoundAttempt.advance = advanced  # type: ignore[method-assign, assignment]

    def _hook_end(self) -> None:
        import megatron.training.training as training

        train = training.train

        @wraps(train)
        def measured(*args: Any, **kwargs: Any) -> Any:
            try:
                return train(*args, **kwargs)
            finally:
                if len(self.begins) > 1:
                    path = Path(os.environ["SPY_DIR"]) / f"control-{os.environ['RANK']}.json"
                    write_atomic(path, json.dumps(self.numbers()) + "\n")

        training.train = measured

    def numbers(self) -> Mapping[str, Any]:
        """What `RankTimes` reads."""
        count = len(self.begins) - 1
        steps = [later - earlier for earlier, later in pairwise(self.begins)]
        agent = (self.agent[1] - self.agent[0]) / count
        return asdict(RankTimes(median(steps), self.seconds / count, agent, self.meetings))


def _agent_seconds() -> float:
    """CPU seconds of the thread that speaks with the hub; 0 where there is none."""
    for thread in threading.enumerate():
        if thread.name == AGENT_THREAD and thread.ident is not None:
            return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    return 0.0
