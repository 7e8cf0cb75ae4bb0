"""The compared scenarios and kinds of training, and what is measured in a run.

| kind | training |
|---|---|
| ideal | every replica alone, as stock Megatron with one rank, without waiting |
| stock | one stock Megatron job over all replicas, with the overlaps of its distributed optimizer |
| edit | EDiT: the replicas sync after tau steps |
| a-edit | A-EDiT: the replicas sync by time, after as long as a round of `edit` takes |

All kinds have the same slowdown and the same Megatron flags, so that they differ only in their
waiting and their exchange. Warm-up, whose steps equal those of `stock`, is a single step: it aligns
the replicas, which may have started at different times.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

from frame.gpt import Model, edit_flags

IDEAL = "ideal"
STOCK = "stock"
EDIT = "edit"
A_EDIT = "a-edit"
KINDS = (IDEAL, STOCK, EDIT, A_EDIT)
SYNCING = (EDIT, A_EDIT)

RANDOM = "random"
EQUAL = "equal"
WARMUP_STEPS = 1
SKIPPED_ROUNDS = 1  # not measured: some replicas are still slow after their start
# Never reached: a run is ended as soon as it has been measured. The end of training is excluded, as
# A-EDiT assigns the last samples by quota there.
TRAIN_ITERS = 20_000
# Minimal compute, as the replicas share a few cores.
MODEL = Model(num_layers=1, hidden_size=64, seq_length=64, vocab_size=1024, bucket_numel=60_000)

# Environment variables of a replica: the plan, its number, and the file for the begin of its steps.
# `RANK` cannot be used: the launcher rewrites it before the training script runs.
PLAN_VARIABLE = "STRAGGLER_PLAN"
REPLICA_VARIABLE = "STRAGGLER_REPLICA"
MARKS_VARIABLE = "STRAGGLER_MARKS"


def check_scenario(name: str) -> str:
    """Return a name: `random`, `equal`, or like `4x`, the last replica takes four times as long.

    Raises:
        ValueError: it is none of these.
    """
    is_factor = name[-1:] == "x" and name[:-1].isdecimal() and int(name[:-1]) > 1
    if name not in (RANDOM, EQUAL) and not is_factor:
        raise ValueError(f"scenario {name}: one of random, equal, 2x, 3x, 4x, ...")
    return name


def title_of(scenario: str) -> str:
    """Return the title of a scenario."""
    titles = {RANDOM: "random stragglers", EQUAL: "all equal"}
    return titles.get(scenario, f"one {scenario} slower")


@dataclass(frozen=True)
class Plan:
    """The length of the steps of each replica, without waiting and exchanges.

    Attributes:
        scenario: see `check_scenario`. In `random`, in each step one randomly drawn replica takes
            one step longer.
        num_replicas: N.
        step: seconds of a step without slowdown.
        seed: of the draws.
    """

    scenario: str
    num_replicas: int
    step: float
    seed: int = 0

    @property
    def is_random(self) -> bool:
        """Whether a randomly drawn replica is slow in each step."""
        return self.scenario == RANDOM

    @property
    def factor(self) -> int:
        """Slowdown of the last replica."""
        return 1 if self.scenario in (RANDOM, EQUAL) else int(self.scenario[:-1])

    def step_seconds(self, replica: int, step: int) -> float:
        """Return the seconds of a step of a replica; steps count from 0."""
        if self.is_random:
            return (1 + (self.drawn_replica(step) == replica)) * self.step
        return (self.factor if replica == self.num_replicas - 1 else 1) * self.step

    def drawn_replica(self, step: int) -> int:
        """Return the replica that is drawn for a step."""
        return random.Random(f"{self.seed} {step}").randrange(self.num_replicas)

    def to_json(self) -> str:
        """Return the JSON text for the environment variable."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Job:
    """One kind of training in one scenario.

    Attributes:
        plan: lengths of the steps.
        tau: steps per round of a replica that is not slow. With a consistent straggler EDiT's
            interval is divided by its factor, so that rounds take the same time.
        rounds: measured in a run, after the first.
        seconds: measured time of kinds without rounds.
        phase: share of a step of the slowest replica by which A-EDiT's rounds last longer. As the
            length of steps is constant here, it determines at which point of such a step a round
            ends, and how long the other replicas wait.
    """

    kind: str
    plan: Plan
    tau: int
    rounds: int
    seconds: float
    phase: float = 0.5

    @property
    def interval(self) -> int:
        """EDiT's tau."""
        return max(1, self.tau // self.plan.factor)

    @property
    def round_seconds(self) -> float:
        """A-EDiT's tau_time: the time of EDiT's steps of a round, plus `phase`."""
        mean_step = self.plan.factor + self.plan.is_random / self.plan.num_replicas
        return (self.interval + self.phase) * mean_step * self.plan.step

    @property
    def edit_steps(self) -> tuple[int, int]:
        """Range of EDiT's measured steps, from 0: the first, and the first one after the range."""
        rounds = (SKIPPED_ROUNDS, SKIPPED_ROUNDS + self.rounds)
        first, last = (WARMUP_STEPS + self.interval * count for count in rounds)
        return first, last

    def flags(self, log_dir: str) -> list[str]:
        """Return all flags of the training script."""
        ranks = 1 if self.kind == IDEAL else self.plan.num_replicas  # of a launch
        # A console line of stock Megatron costs a barrier.
        flags = MODEL.flags(ranks, train_iters=TRAIN_ITERS, log_interval=TRAIN_ITERS)
        if self.kind not in SYNCING:
            return flags
        flags += edit_flags(ranks, warmup_steps=WARMUP_STEPS, log_dir=log_dir)
        flags += ["--edit-strategy", self.kind]
        if self.kind == EDIT:
            return [*flags, "--edit-sync-interval", str(self.interval)]
        # The minimum is off: rounds are long enough, and of the same length for all kinds.
        seconds = f"{self.round_seconds:.3f}"
        return [*flags, "--edit-sync-seconds", seconds, "--edit-min-round-steps", "0"]
