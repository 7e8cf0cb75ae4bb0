"""The study: its questions in order of priority, and for each the runs that answer it.

Runs that several questions need are the same runs: they are known by their hash. What is
compared is compared seed by seed; a member has every seed, or only the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from megatron_edit.method.strategy import STRATEGIES

from .cases import Case, Size, Stage
from .corruption import TEXT, Corruption
from .marks import marks
from .quality import quality
from .questions import Member, Question

SEEDS = (1, 2, 3)
NUM_REPLICAS = 4
TAUS = (16, 64)
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
ONE_HOT = "1e-6"  # a temperature at which the least norm takes all
STEP_SECONDS = 0.15  # of a step of four replicas on two cores: what A-EDiT's clock is set by
CORRUPTED_REPLICA = 1
# Share of the steps: bursts begin when detectors have seen enough to be armed, and do not end
# together with rounds. A detector is armed after 20 syncs: after step 416 of 960.
BURSTS = ((488 / 960, 520 / 960), (616 / 960, 648 / 960), (744 / 960, 776 / 960),
          (872 / 960, 904 / 960))  # fmt: skip


@dataclass(frozen=True)
class Study:
    """Makes the questions for a model.

    Attributes:
        size: of it.
        seeds: of all runs.
    """

    size: Size = field(default_factory=Size)
    seeds: tuple[int, ...] = SEEDS

    @property
    def questions(self) -> tuple[Question, ...]:
        """In order of priority."""
        return (
            *marks(self),
            *quality(self),
            self._strategies(), self._ablation(), self._two_replicas(), self._warmup(),
            self._temperature(), self._bursts(), self._rates(), self._elastic(), self._beyond(),
        )  # fmt: skip

    def member(
        self, label: str, strategy: str, *flags: str, base: str = "", size: Size | None = None,
        num_replicas: int = NUM_REPLICAS, tau: int = TAUS[0], num_seeds: int | None = None,
        **changes: Any,
    ) -> Member:  # fmt: skip
        """A member with one case for each seed.

        Args:
            label: for people.
            strategy: the value of `--edit-strategy`.
            flags: further ones.
            base: whom it is compared with.
            size: of the model, where it is not the study's.
            num_replicas: N, all the time.
            tau: sync interval.
            num_seeds: how many of the study's seeds, the first ones; None for all.
            changes: of other fields of `Case`.
        """
        size = size or self.size
        first = Case(
            strategy=strategy,
            seed=0,
            stages=(Stage(num_replicas, size.train_iters),),
            size=size,
            warmup_steps=size.train_iters // 10,
            tau=tau,
            lr=size.lr,
            samples_per_step=num_replicas * size.micro_batch_size,
            flags=flags,
        )
        first = replace(first, **changes)
        seeds = self.seeds[:num_seeds]
        return Member(label, tuple(replace(first, seed=seed) for seed in seeds), base)

    def corrupted(self, member: Member, kind: str = TEXT, *, checks_losses: bool = False) -> Member:
        """The case seed is also that of the bad data: paired runs get the same.

        Args:
            member: on clean data.
            kind: of bad data.
            checks_losses: whether the loss check is on; older results were made without it.
        """
        steps = self.size.train_iters
        has_penalty = STRATEGIES[member.cases[0].strategy].has_penalty
        is_unchecked = has_penalty and not checks_losses
        without_check = ("--edit-no-loss-check",) if is_unchecked else ()
        bursts = tuple((round(a * steps), round(b * steps)) for a, b in BURSTS)
        cases = tuple(
            replace(
                c,
                corruption=Corruption(CORRUPTED_REPLICA, bursts, c.seed, kind),
                flags=(*c.flags, *without_check),
            )
            for c in member.cases
        )
        return replace(member, cases=cases)

    def _strategies(self) -> Question:
        members = [self.member("ddp", "ddp")]
        for tau in TAUS:
            clock = ("--edit-sync-seconds", f"{tau * STEP_SECONDS:g}",
                     "--edit-min-round-steps", str(2 * tau))  # fmt: skip
            own = {"local-sgd": ("--edit-warmup-steps", "0"), "a-edit": clock}
            for name in ("local-sgd", "post-local-sgd", "slowmo", "diloco", "co2",
                         "streaming-diloco", "edit", "a-edit"):  # fmt: skip
                label = f"{name}, tau {tau}"
                members.append(self.member(label, name, *own.get(name, ()), base="ddp", tau=tau))
        return Question("strategies", "All strategies, four replicas", tuple(members))

    def _ablation(self) -> Question:
        edit = "edit"
        members = [self.member(edit, "edit"), *self._parts(edit)]
        return Question("ablation", "Parts of the penalty, clean data, tau 16", tuple(members))

    def _parts(self, base: str, **changes: Any) -> list[Member]:
        """EDiT without single parts of the penalty, with single parts, and without all."""
        off = {"elimination": "--edit-no-anomaly", "weights": "--edit-no-weighting",
               "clip": "--edit-no-clip"}  # fmt: skip
        members = [
            self.member(f"without {part}", "edit", word, base=base, **changes)
            for part, word in off.items()
        ]
        for part in off:
            words = [word for other, word in off.items() if other != part]
            members.append(self.member(f"{part} alone", "edit", *words, base=base, **changes))
        return [*members, self.member("no penalty", "edit", *off.values(), base=base, **changes)]

    def _two_replicas(self) -> Question:
        members = [self.member("ddp", "ddp", num_replicas=2)]
        for tau in TAUS:
            for name in ("diloco", "edit"):
                label = f"{name}, tau {tau}"
                members.append(self.member(label, name, base="ddp", num_replicas=2, tau=tau))
        return Question("two-replicas", "Two replicas", tuple(members))

    def _warmup(self) -> Question:
        steps = self.size.train_iters
        members = [self.member("ddp", "ddp")]
        for percent in (10, 25):
            warmup = steps * percent // 100
            label = f"edit, warm-up {percent} %"
            members.append(self.member(label, "edit", base="ddp", warmup_steps=warmup))
        return Question("warm-up", "Length of the synchronous warm-up, tau 16", tuple(members))

    def _temperature(self) -> Question:
        members = [self.member("auto", "edit"), *self._temperatures("auto")]
        return Question("temperature", "Temperature of the weights, clean data", tuple(members))

    def _temperatures(self, base: str, **changes: Any) -> list[Member]:
        found = []
        for label, value in (("T = 1", "1"), ("one-hot", ONE_HOT)):
            words = ("--edit-weight-temperature", value)
            found.append(self.member(label, "edit", *words, base=base, **changes))
        return found

    def _bursts(self) -> Question:
        base = "edit"
        members = [
            self.member(base, "edit"), self.member("ddp", "ddp", base=base),
            self.member("diloco", "diloco", base=base), *self._parts(base),
            *self._temperatures(base),
        ]  # fmt: skip
        title = "One of four replicas fed random tokens in bursts: parts of the penalty"
        return Question("bursts", title, tuple(map(self.corrupted, members)))

    def _rates(self) -> Question:
        """Each replica keeps its batch: with more of them, a step has more samples."""
        members = []
        for strategy, counts in (("ddp", (1, 2, 4, 8)), ("edit", (2, 4, 8))):
            for num_replicas in counts:
                for rate in RATES:
                    series = f"{strategy}, N = {num_replicas}"
                    label = f"{series}, {rate:g}"
                    found = self.member(label, strategy, num_replicas=num_replicas, lr=rate)
                    members.append(replace(found, series=series, place=rate))
        title = "Learning rate and number of replicas"
        return Question("rates", title, tuple(members), axis="peak learning rate")

    def _elastic(self) -> Question:
        """A step has as many samples whatever the number of replicas."""
        steps = self.size.train_iters
        batch = NUM_REPLICAS * self.size.micro_batch_size
        base = "four throughout"
        members = [self.member(base, "edit")]
        for label, counts in (("1, 2, 4", (1, 2, 4)), ("4, 2, 1", (4, 2, 1)),
                              ("one throughout", (1,))):  # fmt: skip
            stages = tuple(
                Stage(count, steps * (number + 1) // len(counts))
                for number, count in enumerate(counts)
            )
            members.append(
                self.member(label, "edit", base=base, stages=stages, samples_per_step=batch)
            )
        return Question("elastic", "The number of replicas changes by resuming", tuple(members))

    def _beyond(self) -> Question:
        base = "edit"
        variants = {
            "4 fragments": ("--edit-fragments", "4"),
            "delay 4": ("--edit-delay-steps", "4"),
            "4 fragments, delay 4": ("--edit-fragments", "4", "--edit-delay-steps", "4"),
            "delay 4, mix 0.5": ("--edit-delay-steps", "4", "--edit-mix", "0.5"),
            "bf16 on the wire": ("--edit-sync-dtype", "bf16"),
            "int8 on the wire": ("--edit-sync-dtype", "int8"),
            "int4 on the wire": ("--edit-sync-dtype", "int4"),
        }
        members = [self.member(base, "edit")]
        members += [self.member(label, "edit", *words, base=base)
                    for label, words in variants.items()]  # fmt: skip
        return Question("beyond", "Beyond the paper, tau 16", tuple(members))
