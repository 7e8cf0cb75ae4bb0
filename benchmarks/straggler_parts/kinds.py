"""What is compared: the scenarios, the kinds of training, and what is measured of a run.

| kind | what trains |
|---|---|
| ideal | every replica alone, as stock Megatron with one rank: nobody waits for anybody |
| stock | one stock Megatron job over all replicas, with the overlaps of its distributed optimizer |
| edit | EDiT: the replicas meet after tau steps |
| a-edit | A-EDiT: the replicas meet by the clock, after as long as a round of `edit` takes |
| a-edit-blocking | the same with syncs that do not overlap (not measured by default) |

All kinds are slowed alike and have the same Megatron flags, so that they differ in their waiting
and their exchange alone. Warm-up, whose steps are those of `stock`, is a single step; the replicas
then part together, however long each needed to start.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace

from frame.gpt import Model, edit_flags

IDEAL = "ideal"
STOCK = "stock"
EDIT = "edit"
A_EDIT = "a-edit"
A_EDIT_BLOCKING = "a-edit-blocking"
KINDS = (IDEAL, STOCK, EDIT, A_EDIT)
ALL_KINDS = (*KINDS, A_EDIT_BLOCKING)
SYNCING = (EDIT, A_EDIT, A_EDIT_BLOCKING)

RANDOM = "random"
EQUAL = "equal"
IN_FORWARD = "-forward"
FORWARD_SHARE = 1 / 3  # of a step, as of one that computes
WARMUP_STEPS = 1
SKIPPED_ROUNDS = 1  # not measured: some replicas are still getting going
# Never reached: a run is ended as soon as it has been measured. The end of training is no part of
# it, where A-EDiT deals the last samples by quota.
TRAIN_ITERS = 20_000
# As little to compute as can be: the replicas share a few cores.
MODEL = Model(num_layers=1, hidden_size=64, seq_length=64, vocab_size=1024, bucket_numel=60_000)
DEEP_MODEL = replace(MODEL, num_layers=4)  # layers whose exchanges can hide behind others

# How a replica learns of it, and where it notes when its steps begin. `RANK` would not do: the
# launcher rewrites it before the training script runs.
PLAN_VARIABLE = "STRAGGLER_PLAN"
REPLICA_VARIABLE = "STRAGGLER_REPLICA"
MARKS_VARIABLE = "STRAGGLER_MARKS"


@dataclass(frozen=True)
class Plan:
    """How long the steps of each replica last, but for waiting and exchanges.

    Attributes:
        step: of a replica that is not slow, seconds.
        factors: per replica, how many such steps one of its steps takes; 1 is not slow.
        is_random: whether in each step one replica, drawn anew, takes a mean step more.
        seed: of the draws.
        forward_share: part of a step that the layers' forward passes sleep; the rest follows.
    """

    step: float
    factors: tuple[float, ...]
    is_random: bool = False
    seed: int = 0
    forward_share: float = 0.0

    def step_seconds(self, replica: int, step: int) -> float:
        """Of a replica in a step, which counts from 0."""
        is_struck = self.is_random and self.struck(step) == replica
        return (self.factors[replica] + is_struck) * self.step

    def struck(self, step: int) -> int:
        """The replica that is drawn for a step."""
        return random.Random(f"{self.seed} {step}").randrange(len(self.factors))

    def to_json(self) -> str:
        """For the environment of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The way back."""
        fields = json.loads(text)
        return cls(**fields | {"factors": tuple(fields["factors"])})


@dataclass(frozen=True)
class Scenario:
    """Which replicas are slow.

    Attributes:
        name: `random`, `equal`, or like `4x`: the last replica takes four times as long. With
            `-forward` behind it a third of a step's sleep is in the layers' forward passes.
        factor: of the last replica.
        rounds: measured in a run, after the first.
        in_forward: see `name`.
    """

    name: str
    factor: int = 1
    rounds: int = 3
    in_forward: bool = False

    @classmethod
    def named(cls, name: str, rounds: int) -> Scenario:
        """The scenario of a name; a round less where nobody is slow in every step."""
        kind = name.removesuffix(IN_FORWARD)
        factor = int(kind.removesuffix("x")) if kind.endswith("x") else 1
        if factor < 1 or (factor == 1 and kind not in (RANDOM, EQUAL)):
            raise ValueError(f"scenario {name}: one of random, equal, 2x, 3x, 4x, ..., 4x-forward")
        rounds = rounds if factor > 1 else max(1, rounds - 1)
        return cls(name, factor, rounds, in_forward=kind != name)

    @property
    def title(self) -> str:
        """For people."""
        where = ", in its layers" if self.in_forward else ""
        if self.factor > 1:
            return f"one {self.factor}x slower{where}"
        return ("random stragglers" if self.is_random else "all equal") + where

    @property
    def is_random(self) -> bool:
        """Whether another replica is slow in each step."""
        return self.name.removesuffix(IN_FORWARD) == RANDOM

    @property
    def model(self) -> Model:
        """What is trained."""
        return DEEP_MODEL if self.in_forward else MODEL

    def plan(self, num_replicas: int, *, step: float, seed: int) -> Plan:
        """How long steps last; seconds."""
        factors = (*[1.0] * (num_replicas - 1), float(self.factor))
        share = FORWARD_SHARE if self.in_forward else 0.0
        return Plan(step, factors, is_random=self.is_random, seed=seed, forward_share=share)


@dataclass(frozen=True)
class Job:
    """One kind of training in one scenario.

    Attributes:
        plan: of the lengths of steps.
        tau: steps of a round of a replica that is not slow. EDiT's interval is a part of it where
            one replica is, so that its rounds do not last longer.
        seconds: how long kinds without rounds are measured.
        phase: part of a step of the slowest replica, by which A-EDiT's rounds last longer. Steps
            here always last the same; so it is this that decides at which point of such a step a
            round ends, and how long the others then wait.
    """

    scenario: Scenario
    kind: str
    plan: Plan
    tau: int
    seconds: float
    phase: float = 0.5

    @property
    def model(self) -> Model:
        """What is trained."""
        return self.scenario.model

    @property
    def num_replicas(self) -> int:
        """N."""
        return len(self.plan.factors)

    @property
    def interval(self) -> int:
        """EDiT's tau."""
        return max(1, self.tau // self.scenario.factor)

    @property
    def round_seconds(self) -> float:
        """A-EDiT's tau_time: what EDiT's steps of a round take, and `phase`."""
        mean_step = max(self.plan.factors) + self.plan.is_random / self.num_replicas
        return (self.interval + self.phase) * mean_step * self.plan.step

    @property
    def edit_steps(self) -> tuple[int, int]:
        """Number of the first step, from 0, that is measured of EDiT, and of the first after."""
        rounds = (SKIPPED_ROUNDS, SKIPPED_ROUNDS + self.scenario.rounds)
        first, last = (WARMUP_STEPS + self.interval * count for count in rounds)
        return first, last

    @property
    def tokens_per_step(self) -> int:
        """Of one replica."""
        return self.model.tokens_per_replica

    @property
    def world_size(self) -> int:
        """Ranks of a launch."""
        return 1 if self.kind == IDEAL else self.num_replicas

    def flags(self, log_dir: str) -> list[str]:
        """All flags of the training script."""
        # A line of stock Megatron on the console costs a barrier.
        flags = self.model.flags(self.world_size, train_iters=TRAIN_ITERS, log_interval=TRAIN_ITERS)
        if self.kind not in SYNCING:
            return flags
        flags += edit_flags(self.num_replicas, warmup_steps=WARMUP_STEPS, log_dir=log_dir)
        flags += ["--edit-strategy", EDIT if self.kind == EDIT else A_EDIT]
        if self.kind == A_EDIT_BLOCKING:
            flags += ["--edit-sync-mode", "blocking"]
        if self.kind == EDIT:
            return [*flags, "--edit-sync-interval", str(self.interval)]
        # Rounds are long enough, and of the same length for all kinds.
        rhythm = ("--edit-sync-seconds", f"{self.round_seconds:.3f}", "--edit-min-round-steps", "0")
        return [*flags, *rhythm]
