"""The study: its questions in order of priority, and the runs that answer each of them.

Questions share runs, which are identified by their hash. Members are compared seed by seed; a
member has all seeds, or only the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from frame.launch import REPOSITORY

from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.flags import read_flags

from .cases import MUON, Case, Member, Question, Size, Stage
from .corruption import LABELS, TEXT, Corruption

SEEDS = (1, 2, 3)
NUM_REPLICAS = 4
TAUS = (16, 64)
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
ONE_HOT = "1e-6"  # a temperature at which the replica with the smallest norm has all the weight
STEP_SECONDS = 0.15  # of a step of four replicas on two cores; sets A-EDiT's interval
CORRUPTED_REPLICA = 1
# Shares of the steps: bursts begin after the detectors are armed (20 syncs: step 416 of 960), and
# do not end at the end of a round.
BURSTS = ((488 / 960, 520 / 960), (616 / 960, 648 / 960), (744 / 960, 776 / 960),
          (872 / 960, 904 / 960))  # fmt: skip


@dataclass(frozen=True)
class Study:
    """The questions for one model.

    Attributes:
        size: of the model.
        seeds: of all runs.
    """

    size: Size = field(default_factory=Size)
    seeds: tuple[int, ...] = SEEDS

    @property
    def questions(self) -> tuple[Question, ...]:
        """All questions, in order of priority."""
        return (
            *comparison_questions(self),
            *quality_questions(self),
            self._strategies(), self._ablation(), self._two_replicas(), self._warmup(),
            self._temperature(), self._bursts(), self._rates(), self._elastic(), self._beyond(),
        )  # fmt: skip

    def member(
        self, label: str, strategy: str, *flags: str, base: str = "", size: Size | None = None,
        num_replicas: int = NUM_REPLICAS, tau: int = TAUS[0], num_seeds: int | None = None,
        **changes: Any,
    ) -> Member:  # fmt: skip
        """Return a member with one case per seed.

        Args:
            label: in tables.
            strategy: the value of `--edit-strategy`.
            flags: additional flags.
            base: label of the member that it is compared with.
            size: of the model; that of the study by default.
            num_replicas: N, constant.
            tau: sync interval.
            num_seeds: use so many of the study's seeds; None for all.
            changes: other fields of `Case`.
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
        """Return a member with bad data, seeded by the case, so that paired runs have the same.

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
        """Return EDiT without each part of the penalty, with each part alone, and with none."""
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
        """Return a sweep with a constant batch per replica, so that N scales the samples."""
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
        """Return cases with a constant number of samples per step and changing replicas."""
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


BATCHES = (4, 8, 16)  # samples per replica and step
# As in the speed measurement of delayed syncs, overlap_parts/kinds.py. With a fragment per unit,
# the largest unit determines how many steps hide an exchange; one fragment needs more steps.
DELAYED_TAU, DELAYS = 40, ((4, 8), (4, 12), (1, 15), (1, 30))  # fragments and steps
# Smaller outer momentum, which suits delayed pseudo-gradients; with the delay and without it.
LOW_MOMENTUM = ("outer-momentum 0.7", "--edit-outer-momentum", "0.7")
LOWER_MOMENTA = (
    ("outer-momentum 0.6", "--edit-outer-momentum", "0.6"),
    ("outer-momentum 0.5", "--edit-outer-momentum", "0.5"),
    ("outer-lr 1, outer-momentum 0.5", "--edit-outer-lr", "1", "--edit-outer-momentum", "0.5"),
)
LOW_MOMENTUM_DELAYS = ((4, 8), (4, 10))  # with smaller momentum, over several seeds
# By interval: wire type, nu and mu_o, with the number of seeds.
COARSE_WIRES = {
    64: {
        ("fp32", 0.8, 0.7): 2,
        ("int2", 0.9, 0.6): 2,
        ("ternary", 1.0, 0.5): 2,
        ("sign", 1.0, 0.5): 1,
        ("int2", 0.8, 0.85): 1,
        ("ternary", 0.8, 0.85): 1,
        ("sign", 0.8, 0.85): 1,
    },
    16: {("ternary", 0.8, 0.85): 1, ("ternary", 1.0, 0.5): 1},
}
# Pairs of nu and mu_o by number of replicas and interval; and those with a second seed.
USUAL_OUTER = (0.8, 0.85)
LESS_OUTER, LEAST_OUTER = (0.8, 0.7), (0.9, 0.6)
OUTER_PAIRS = {
    (4, 8): (USUAL_OUTER, (0.8, 0.8), (0.9, 0.7), LEAST_OUTER),
    (4, 64): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
    (4, 16): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
    (4, 128): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
    (4, 32): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
    (2, 64): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
    (2, 16): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
    (2, 8): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
    (2, 32): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
    (2, 128): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
    (4, 256): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
    (2, 256): (USUAL_OUTER, LESS_OUTER, LEAST_OUTER),
}
OUTER_TWO_SEEDS: dict[tuple[int, int], tuple[tuple[float, float], ...]] = {}
BAD_DATA = {
    TEXT: ("marks-bursts", "random tokens"),
    LABELS: ("marks-labels", "text with random labels"),
}


def comparison_questions(study: Study) -> tuple[Question, ...]:
    """Return the comparison with other strategies, in order of priority.

    Most runs are shared with later questions.
    """
    bad = (_bursts(study, TEXT), _bursts(study, LABELS))
    return (
        _compare_strategies(study), _batch(study), _wire(study), _coarse(study), _outer(study),
        *bad, _delay(study),
    )  # fmt: skip


def _compare_strategies(study: Study) -> Question:
    edit = "edit, tau 16"
    quarter = study.size.train_iters // 4
    members = (
        study.member("ddp", "ddp"),
        study.member(edit, "edit", base="ddp"),
        study.member(f"{edit}, warm-up 25 %", "edit", base="ddp", warmup_steps=quarter),
        study.member("diloco, tau 16", "diloco", base=edit),
        study.member("post-local-sgd, tau 16", "post-local-sgd", base=edit),
    )
    return Question("marks", "EDiT beside stock DDP and its rivals, four replicas", members)


def _batch(study: Study) -> Question:
    """Return a sweep over the samples per step: a replica's local steps are noisier than DDP's."""
    quarter, members = study.size.train_iters // 4, []
    for batch in BATCHES:
        size = replace(study.size, micro_batch_size=batch)
        ddp = f"ddp, {batch} samples"
        edit = f"edit, {batch} samples"
        members += [
            study.member(ddp, "ddp", size=size),
            study.member(edit, "edit", base=ddp, size=size, warmup_steps=quarter),
        ]
    title = "Samples of a replica in a step, tau 16, warm-up 25 %"
    return Question("marks-batch", title, tuple(members))


def _wire(study: Study) -> Question:
    edit = "edit, tau 16"
    wires = (
        study.member(f"{edit}, {wire}", "edit", "--edit-sync-dtype", wire, base=edit)
        for wire in ("int8", "int4")
    )
    members = (study.member(edit, "edit"), *wires)
    return Question("marks-wire", "Fewer bits on the wire", members)


def _coarse(study: Study) -> Question:
    """Return wire types of about two bits an element and less, with outer settings of their own."""
    members = []
    for tau, wires in COARSE_WIRES.items():
        members.append(study.member(plain(tau), "edit", tau=tau, num_seeds=2))
        for (wire, lr, momentum), num_seeds in wires.items():
            flags = ("--edit-sync-dtype", wire, "--edit-outer-lr", str(lr),
                     "--edit-outer-momentum", str(momentum))  # fmt: skip
            label = f"{plain(tau)}, {wire}, nu {lr:g}, mu_o {momentum:g}"
            options: dict[str, Any] = {"base": plain(tau), "tau": tau, "num_seeds": num_seeds}
            members.append(study.member(label, "edit", *flags, **options))
    for tau in sorted(COARSE_WIRES):
        options = {"base": plain(tau), "tau": tau, "num_seeds": 1}
        members.append(study.member(f"sparse-loco, tau {tau}", "sparse-loco", **options))
    members.append(
        study.member(
            f"{plain(64)}, int2, nu 0.9, mu_o 0.6, warm-up int8", "edit", "--edit-sync-dtype",
            "int2", "--edit-outer-lr", "0.9", "--edit-outer-momentum", "0.6",
            "--edit-warmup-dtype", "int8", base=plain(64), tau=64, num_seeds=2,
        )
    )  # fmt: skip
    title = "Two bits an element on the wire, and less"
    return Question("coarse", title, tuple(members))


def outer_label(num_replicas: int, tau: int, outer: tuple[float, float]) -> str:
    """Return the label of outer learning rate and momentum at an interval."""
    return f"N {num_replicas}, tau {tau}: nu {outer[0]:g}, mu_o {outer[1]:g}"


def _outer(study: Study) -> Question:
    """Return outer learning rates and momenta by interval, with averaged moments."""
    flags = ("--edit-average-moments", "both", "--edit-scale-beta2")
    members = []
    for (num_replicas, tau), pairs in OUTER_PAIRS.items():
        base = outer_label(num_replicas, tau, USUAL_OUTER)
        for outer in pairs:
            words = ("--edit-outer-lr", str(outer[0]), "--edit-outer-momentum", str(outer[1]))
            options: dict[str, Any] = {
                "tau": tau, "num_replicas": num_replicas,
                "base": "" if outer == USUAL_OUTER else base,
                "num_seeds": 2 if outer in OUTER_TWO_SEEDS.get((num_replicas, tau), ()) else 1,
            }  # fmt: skip
            label = outer_label(num_replicas, tau, outer)
            members.append(study.member(label, "edit", *flags, *words, **options))
    return Question("outer", "Outer learning rate and momentum by interval", tuple(members))


def _delay(study: Study) -> Question:
    edit = f"edit, tau {DELAYED_TAU}"

    def delayed(fragments: int, delay: int, also: str = "", *words: str) -> Member:
        label, flags = f"delay {delay}", ("--edit-delay-steps", str(delay), *words)
        if fragments > 1:
            label = f"{fragments} fragments, {label}"
            flags = ("--edit-fragments", str(fragments), *flags)
        label += f", {also}" if also else ""
        return study.member(label, "edit", *flags, base=edit, tau=DELAYED_TAU)

    members = [
        study.member("ddp", "ddp"),
        study.member(edit, "edit", base="ddp", tau=DELAYED_TAU),
    ]
    int8 = ("--edit-sync-dtype", "int8")
    for where in LOW_MOMENTUM_DELAYS:
        members += [
            delayed(*where, *LOW_MOMENTUM),
            delayed(*where, f"{LOW_MOMENTUM[0]}, int8", *LOW_MOMENTUM[1:], *int8),
        ]
    members += [delayed(*where) for where in DELAYS]
    members += [
        delayed(4, 12, "mix 0.5", "--edit-mix", "0.5"),
        delayed(4, 12, *LOWER_MOMENTA[0]),
        delayed(*DELAYS[-1], "int8", *int8),
    ]
    members += [delayed(*DELAYS[0], *words) for words in LOWER_MOMENTA]
    members += [
        study.member(f"{edit}, {label}", "edit", *words, base=edit, tau=DELAYED_TAU)
        for label, *words in (LOW_MOMENTUM, LOWER_MOMENTA[0])
    ]
    return Question("marks-delay", "Delayed syncs", tuple(members))


def _bursts(study: Study, kind: str) -> Question:
    names = ("ddp", "diloco", "post-local-sgd")
    members = (study.member("edit", "edit"), *(study.member(n, n, base="edit") for n in names))
    name, bad = BAD_DATA[kind]
    title = f"One of four replicas fed {bad} in bursts: the strategies"
    return Question(name, title, tuple(study.corrupted(member, kind) for member in members))


RECOMMENDED = tuple(read_flags(REPOSITORY / "configs" / "edit_quality.args"))
LARGER_BETA2 = "0.9873"  # 0.95 ** (1 / 4), that of each of four replicas with --edit-scale-beta2
DDP, DDP_LARGER_BETA2 = "ddp, beta2 0.95", f"ddp, beta2 {LARGER_BETA2}"
SHORT, LONG = 16, 64  # sync intervals
SAMPLES = (4, 8, 16, 32)  # per replica and step
HIDDEN_SIZES = (96, 192, 384)
MUON_FLAGS = ("--optimizer", MUON, "--muon-fp32-matmul-prec", "high")
# Chosen with knowledge of the losses with and without it, as the page says.
MUON_SCALE = "0.2"
MUON_RATES = (2e-3, 4e-3)
MUON_RATE = 4e-3  # the better one with that scale
MUON_OUTER = ("--edit-outer-lr", "0.9", "--edit-outer-momentum", "0.6")
FINAL_SHARES = ("0.025", "0.05", "0.1")
CLEAN, CHECKED, UNCHECKED = "clean", "bursts, loss check", "bursts, no loss check"


def plain(tau: int) -> str:
    """Return the label of EDiT with default settings."""
    return f"edit, tau {tau}"


def recommended(tau: int) -> str:
    """Return the label of EDiT with the recommended setting."""
    return f"recommended, tau {tau}"


def muon(label: str) -> str:
    """Return the label of the same setting with Muon, at `MUON_RATE` and `MUON_SCALE`."""
    return f"muon, {label}"


def quality_questions(study: Study) -> tuple[Question, ...]:
    """Return the questions on the recommended setting, in order of priority."""
    return (
        _claims(study), _bad_data(study), _samples(study), _sizes(study), _muon(study),
        _choices(study),
    )  # fmt: skip


def _baselines(study: Study) -> list[Member]:
    larger = ("--adam-beta2", LARGER_BETA2)
    return [
        study.member(DDP, "ddp"),
        study.member(DDP_LARGER_BETA2, "ddp", *larger, base=DDP),
    ]


def _claims(study: Study) -> Question:
    members = _baselines(study)
    for tau in (SHORT, LONG):
        name = recommended(tau)
        members.append(study.member(name, "edit", *RECOMMENDED, base=DDP_LARGER_BETA2, tau=tau))
    base = DDP_LARGER_BETA2
    members += [
        study.member(plain(SHORT), "edit", base=base, tau=SHORT),
        study.member(plain(LONG), "edit", base=base, tau=LONG, num_seeds=1),
    ]
    return Question("quality", "The recommended setting beside stock DDP", tuple(members))


def _bad_data(study: Study) -> Question:
    members = (
        study.member(CLEAN, "edit", *RECOMMENDED),
        study.corrupted(
            study.member(CHECKED, "edit", *RECOMMENDED, base=CLEAN), checks_losses=True
        ),
        study.corrupted(study.member(UNCHECKED, "edit", *RECOMMENDED, base=CLEAN)),
    )
    title = "Random tokens in bursts on one of four replicas, recommended setting"
    return Question("quality-bursts", title, members)


def samples_labels(samples: int) -> tuple[str, str]:
    """Return the labels of stock DDP and of the recommended setting for a number of samples."""
    return f"ddp, {samples} samples", f"recommended, {samples} samples"


def _samples(study: Study) -> Question:
    members = []
    for samples in SAMPLES:
        size = replace(study.size, micro_batch_size=samples)
        members += _pair(study, samples_labels(samples), size=size)
    title = "Samples of a replica in a step, recommended setting, tau 16"
    return Question("quality-samples", title, tuple(members))


def sizes_labels(hidden_size: int) -> tuple[str, str]:
    """Return the labels of stock DDP and of the recommended setting for a hidden size."""
    return f"ddp, hidden size {hidden_size}", f"recommended, hidden size {hidden_size}"


def _sizes(study: Study) -> Question:
    members = []
    for hidden_size in HIDDEN_SIZES:
        size = replace(study.size, hidden_size=hidden_size)
        members += _pair(study, sizes_labels(hidden_size), size=size)
    title = "Size of the model, recommended setting, tau 16"
    return Question("quality-sizes", title, tuple(members))


def _pair(study: Study, labels: tuple[str, str], **changes: Any) -> list[Member]:
    """Return stock DDP with the larger beta2 and the recommended setting, one seed each."""
    ddp, edit = labels
    options: dict[str, Any] = {**changes, "num_seeds": 1}
    return [
        study.member(ddp, "ddp", "--adam-beta2", LARGER_BETA2, **options),
        study.member(edit, "edit", *RECOMMENDED, base=ddp, **options),
    ]


def _muon(study: Study) -> Question:
    scale = ("--muon-extra-scale-factor", MUON_SCALE)
    ddp, members = muon("ddp"), _baselines(study)
    members.append(
        study.member(ddp, "ddp", *MUON_FLAGS, *scale, base=DDP_LARGER_BETA2, lr=MUON_RATE)
    )
    flags = (*MUON_FLAGS, *scale, *MUON_OUTER)
    for tau in (SHORT, LONG):
        name = muon(recommended(tau))
        members.append(
            study.member(name, "edit", *flags, *RECOMMENDED, base=ddp, tau=tau, lr=MUON_RATE)
        )
    members.append(
        study.member(muon(plain(SHORT)), "edit", *flags, base=ddp, lr=MUON_RATE, num_seeds=1)
    )
    for label, words in ((f"scale {MUON_SCALE}", scale), ("scale 1", ())):
        for rate in MUON_RATES:
            if (words, rate) != (scale, MUON_RATE):
                name = f"muon, ddp, {label}, rate {rate:g}"
                options: dict[str, Any] = {"base": ddp, "lr": rate, "num_seeds": 1}
                members.append(study.member(name, "ddp", *MUON_FLAGS, *words, **options))
    return Question("quality-muon", "Muon as the inner optimizer", tuple(members))


def _choices(study: Study) -> Question:
    """Return the parts of the recommended setting, alone and combined, in fp32."""
    base = plain(SHORT)
    second, both = (("--edit-average-moments", which) for which in ("second", "both"))
    beta2 = ("--edit-scale-beta2",)
    final = {share: ("--edit-final-sync-fraction", share) for share in FINAL_SHARES}
    variants = {
        "second moments": second,
        "both moments": both,
        "beta2": beta2,
        "final phase 0.05": final["0.05"],
        "second moments, beta2": (*second, *beta2),
        "both moments, beta2": (*both, *beta2),
        **{f"both moments, beta2, final phase {share}": (*both, *beta2, *words)
           for share, words in final.items()},
    }  # fmt: skip
    members = [study.member(base, "edit", num_seeds=1)]
    members += [
        study.member(label, "edit", *words, base=base, num_seeds=1)
        for label, words in variants.items()
    ]
    members += [
        study.member(plain(LONG), "edit", base=base, tau=LONG, num_seeds=1),
        study.member("both moments, beta2, tau 64", "edit", *both, *beta2, base=plain(LONG),
                     tau=LONG, num_seeds=1),
    ]  # fmt: skip
    flags = (*MUON_FLAGS, "--muon-extra-scale-factor", MUON_SCALE, *MUON_OUTER)
    name = muon(plain(SHORT))
    members += [
        study.member(name, "edit", *flags, base=base, lr=MUON_RATE, num_seeds=1),
        study.member(muon("both moments"), "edit", *flags, *both, base=name, lr=MUON_RATE,
                     num_seeds=1),
    ]  # fmt: skip
    title = "Parts of the recommended setting, alone and together, tau 16, fp32 on the wire"
    return Question("quality-choices", title, tuple(members))
