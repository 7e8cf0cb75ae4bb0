"""Answers from finished runs: means over seeds, paired differences, and the missing runs.

For the recommended setting also losses and bytes compared with stock DDP, power laws fit to them,
and targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from megatron_edit.comm.collectives import all_reduce_payload
from megatron_edit.comm.wire import Wire
from megatron_edit.constants import FP32
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.flags import canonical
from megatron_edit.tools.compare.statistics import Spread, differences, quotients

from .cases import Case, Member, Question
from .records import RunSummary
from .study import (
    CHECKED,
    CLEAN,
    DDP,
    DDP_LARGER_BETA2,
    HIDDEN_SIZES,
    LONG,
    NUM_REPLICAS,
    SAMPLES,
    SHORT,
    Study,
    muon,
    recommended,
    samples_labels,
    sizes_labels,
)

FindRun = Callable[[Case], RunSummary | None]


@dataclass(frozen=True)
class Line:
    """The finished runs of a member of a question.

    Attributes:
        member: of the question.
        planned: number of runs.
        records: of the finished runs, by seed.
        loss: final validation loss.
        difference: of the loss to that of the member's base, seed by seed.
        relative: the difference over the loss of the base.
        num_better: pairs with a loss lower than the base's.
        refusal: why this version cannot run it; "" if it can.
    """

    member: Member
    planned: int
    records: dict[int, RunSummary]
    loss: Spread | None
    difference: Spread | None
    relative: Spread | None
    num_better: int
    refusal: str

    @property
    def bytes_per_step(self) -> Spread | None:
        """Bytes sent by one replica per step after the warm-up."""
        return Spread.of([record.bytes_per_step for record in self.records.values()])

    @property
    def effective(self) -> Spread | None:
        """Median effective number of replicas."""
        return Spread.of([record.effective_replicas for record in self.records.values()])

    @property
    def left_out(self) -> str:
        """Share of syncs and units that excluded each replica, mean over the seeds, as text."""
        rows = [record.left_out for record in self.records.values() if record.left_out]
        means = [sum(column) / len(column) for column in zip(*rows, strict=True)]
        return " ".join(f"{mean:.1%}" for mean in means) if any(means) else ""


def make_lines(question: Question, find: FindRun) -> list[Line]:
    """Return a line for each member."""
    records = {member.label: _finished(member, find) for member in question.members}
    return [_line(member, records) for member in question.members]


def _line(member: Member, records: dict[str, dict[int, RunSummary]]) -> Line:
    losses = _losses(records[member.label])
    base = _losses(records.get(member.base, {}))
    pairs = differences(losses, base)
    return Line(
        member=member,
        planned=len(member.cases),
        records=records[member.label],
        loss=Spread.of(list(losses.values())),
        difference=Spread.of(pairs),
        relative=Spread.of([ratio - 1 for ratio in quotients(losses, base)]),
        num_better=sum(pair < 0 for pair in pairs),
        refusal=member.cases[0].refusal,
    )


def _finished(member: Member, find: FindRun) -> dict[int, RunSummary]:
    found = {case.seed: find(case) for case in member.cases}
    return {seed: record for seed, record in found.items() if record is not None}


def _losses(records: dict[int, RunSummary]) -> dict[int, float]:
    return {seed: record.final_loss for seed, record in records.items()}


@dataclass(frozen=True)
class Backlog:
    """Progress of a question. Runs shared with an earlier question are not counted again.

    Attributes:
        question: of the study.
        planned: number of runs.
        finished: number of finished runs.
        refused: number of runs that this version of the package cannot make.
        refused_cost: of the refused runs.
        todo: missing runs that can be made.
    """

    question: Question
    planned: int
    finished: int
    refused: int
    refused_cost: int
    todo: tuple[Case, ...]

    @property
    def cost(self) -> int:
        """Cost of the missing runs, in steps of single replicas."""
        return sum(case.cost for case in self.todo)


def make_backlog(study: Study, find: FindRun, only: Iterable[str] = ()) -> list[Backlog]:
    """Return the progress of the questions, in order of priority.

    Args:
        study: all questions.
        find: returns finished runs.
        only: names of questions; empty for all.
    """
    wanted, seen, backlog = set(only), set(), []
    for question in study.questions:
        if wanted and question.name not in wanted:
            continue
        # Compare by hash: runs of `ddp` with different sync intervals are the same run.
        new: dict[object, Case] = {}
        for case in question.cases:
            key = case if case.refusal else case.hash({})
            if key not in seen:
                seen.add(key)
                new[key] = case
        refused = [case.cost for case in new.values() if case.refusal]
        done = {key for key, case in new.items() if find(case) is not None}
        todo = [case for key, case in new.items() if key not in done and not case.refusal]
        backlog.append(
            Backlog(question, len(new), len(done), len(refused), sum(refused), tuple(todo))
        )
    return backlog


@dataclass(frozen=True)
class PowerLaw:
    """y = scale * x ** exponent."""

    scale: float
    exponent: float

    def at(self, x: float) -> float:
        """Return the value at `x`, which is above 0."""
        return float(self.scale * x**self.exponent)


# arXiv 2503.09799, fit to its Table 4: DiLoCo's loss over that of data parallelism is
# N ** (scale * P ** exponent), with N replicas and P parameters.
PUBLISHED = PowerLaw(1.0923, -0.2342)


def loss_ratio(law: PowerLaw, num_replicas: int, num_parameters: float) -> float:
    """Return loss over that of data parallelism, by a law for the exponent of N like `PUBLISHED`.

    Args:
        law: exponent of N as a function of the number of parameters.
        num_replicas: N.
        num_parameters: P.
    """
    return float(num_replicas ** law.at(num_parameters))


def exponent_of(ratio: float, num_replicas: int) -> float:
    """Return the exponent of N for a ratio of losses; N is above 1."""
    return math.log(ratio) / math.log(num_replicas)


STEEPEST = 6.0  # largest exponent of a fit, either sign


def fit_power_law(points: Sequence[tuple[float, float]]) -> PowerLaw | None:
    """Fit by least squares of the values (not their logarithms): values may be 0 or below.

    Args:
        points: x, above 0, and y.

    Returns:
        None where no law fits: fewer than two different x, an exponent beyond `STEEPEST`, or a
        scale of 0 or below.
    """
    if len({x for x, _ in points}) < 2:
        return None
    xs, ys = np.array(points, dtype=np.float64).T
    smallest, center, width = xs.min(), 0.0, STEEPEST
    for _ in range(4):  # refine around the best exponent so far
        exponents = np.linspace(center - width, center + width, 1201)
        bases = (xs / smallest) ** exponents[:, None]
        scales = bases @ ys / (bases**2).sum(axis=1)
        errors = ((scales[:, None] * bases - ys) ** 2).sum(axis=1)
        best = int(errors.argmin())
        center, width = float(exponents[best]), width / 300
    if abs(center) >= STEEPEST or scales[best] <= 0:
        return None
    return PowerLaw(float(scales[best] / smallest**center), center)


NUMEL = 1 << 20  # of a unit; so large that the padding of codes is negligible
MOMENTS = {"none": 0, "second": 1, "both": 2}
MOMENT_WIRE = "int8"  # moments are sent in 8-bit codes with a scale per block, like int8


def bytes_per_parameter(case: Case) -> float:
    """Return bytes per parameter sent by one replica in a run, all phases included.

    Payload, without control records.

    Args:
        case: with one stage, and rounds of a fixed number of steps.
    """
    (stage,) = case.stages
    size = stage.num_replicas

    def sent(wire: str) -> float:
        return Wire.of(wire).payload_bytes(NUMEL, size) / NUMEL

    strategy = STRATEGIES[case.strategy]
    values = {name: words[0] for name, words in canonical(case.words).items() if words}
    gradients = sent(values.get("--edit-warmup-dtype", FP32))
    if strategy.endless_warmup:
        return stage.until * gradients
    final = round(float(values.get("--edit-final-sync-fraction", "0")) * stage.until)
    final = min(final, stage.until - case.warmup_steps)
    num_syncs = math.ceil((stage.until - case.warmup_steps - final) / case.tau)
    wire = values.get("--edit-sync-dtype", str(strategy.presets.get("sync_dtype", FP32)))
    num_moments = MOMENTS[values.get("--edit-average-moments", "none")]
    num_moment_syncs = num_syncs // int(values.get("--edit-average-moments-every", "1"))
    return (
        (case.warmup_steps + final) * gradients
        + num_syncs * sent(wire)
        + num_moment_syncs * num_moments * sent(MOMENT_WIRE)
    )


def bytes_over_plain(case: Case) -> float:
    """Return bytes of a run over those of plain EDiT with the same warm-up, interval and N."""
    plain = replace(case, strategy="edit", flags=())
    return bytes_per_parameter(case) / bytes_per_parameter(plain)


GRADIENT_BYTES = all_reduce_payload(4 << 20, NUM_REPLICAS) / (1 << 20)  # per parameter and step


class Answers:
    """Finished runs of the questions, by label.

    Args:
        study: all questions.
        find: returns finished runs.
    """

    def __init__(self, study: Study, find: FindRun) -> None:
        self.study = study
        self._find = find

    @cached_property
    def _lines(self) -> Mapping[tuple[str, str], Line]:
        return {
            (question.name, line.member.label): line
            for question in self.study.questions
            if question.name.startswith("quality")
            for line in make_lines(question, self._find)
        }

    def line(self, question: str, label: str) -> Line:
        """Return the line of a member of a question."""
        return self._lines[question, label]

    def lines(self, question: str) -> list[Line]:
        """Return the lines of all members of a question."""
        return [line for (name, _), line in self._lines.items() if name == question]

    @cached_property
    def baseline(self) -> Line | None:
        """Stock DDP with AdamW at the better finished beta2; None if none is finished."""
        known = [
            (line.loss.num, -line.loss.mean, line)
            for line in (self.line("quality", label) for label in (DDP, DDP_LARGER_BETA2))
            if line.loss is not None
        ]
        # More seeds first: a single seed cannot outweigh three.
        return max(known, key=lambda item: item[:2])[2] if known else None

    def sample_gaps(self) -> list[tuple[float, float]]:
        """Return samples per replica and step with the gap of the recommended setting, one seed."""
        found = ((samples, self._gap("quality-samples", samples_labels(samples)))
                 for samples in SAMPLES)  # fmt: skip
        return [(samples, spread.mean) for samples, spread in found if spread is not None]

    def size_gaps(self) -> list[tuple[float, float]]:
        """Return model parameters with the gap of the recommended setting, one seed."""
        found = []
        for hidden_size in HIDDEN_SIZES:
            labels = sizes_labels(hidden_size)
            spread = self._gap("quality-sizes", labels)
            numel = num_parameters(self.line("quality-sizes", labels[0]))
            if spread is not None and numel is not None:
                found.append((float(numel), spread.mean))
        return found

    def _gap(self, question: str, labels: tuple[str, str]) -> Spread | None:
        ddp, edit = (self.line(question, label) for label in labels)
        return gap(edit, ddp)

    def samples_law(self) -> PowerLaw | None:
        """Return the gap as a power law of the samples per replica and step."""
        return fit_power_law(self.sample_gaps())

    def size_law(self) -> PowerLaw | None:
        """Return the exponent of N as a power law of the parameters, in the form of `PUBLISHED`.

        None where the gap does not fall with the size.
        """
        points = [(numel, exponent_of(1 + gap, NUM_REPLICAS)) for numel, gap in self.size_gaps()]
        law = fit_power_law(points)
        return law if law is not None and law.exponent < 0 else None


def gap(line: Line, base: Line | None) -> Spread | None:
    """Return loss over that of another member, minus 1, over common seeds; None without any."""
    if base is None:
        return None
    losses, others = (
        {seed: record.final_loss for seed, record in each.records.items()} for each in (line, base)
    )
    return Spread.of([ratio - 1 for ratio in quotients(losses, others)])


def num_parameters(ddp: Line) -> int | None:
    """Return the model's parameters, from the bytes per step of stock DDP; None without a run."""
    sent = ddp.bytes_per_step
    return None if sent is None else round(sent.mean / GRADIENT_BYTES)


@dataclass(frozen=True)
class Target:
    """A target with its bound and the measured value.

    Attributes:
        what: the measured quantity.
        wanted: the bound, as text.
        found: the value, as text; "" where there is none yet.
        is_reached: None while runs are missing.
    """

    what: str
    wanted: str
    found: str
    is_reached: bool | None

    @property
    def verdict(self) -> str:
        """The result as a short text."""
        words = {True: "reached", False: "**missed**", None: "open: runs are missing"}
        return words[self.is_reached]


def make_targets(answers: Answers) -> list[Target]:
    """Return all targets, in the order of the page."""
    return [
        *_adam_targets(answers),
        _bytes_target(answers),
        *_muon_targets(answers),
        *_bad_data_targets(answers),
    ]


def _adam_targets(answers: Answers) -> Iterator[Target]:
    for tau, bound in ((SHORT, 0.015), (LONG, 0.06)):
        line = answers.line("quality", recommended(tau))
        spread = gap(line, answers.baseline)
        yield _upper_bound_target(
            f"tau {tau}, 8 samples, relative to stock DDP", spread, bound, line.planned
        )
    ddp, edit = (answers.line("quality-samples", label) for label in samples_labels(32))
    yield _upper_bound_target(
        "tau 16, 32 samples, relative to stock DDP", gap(edit, ddp), 0.003, edit.planned
    )


def _bytes_target(answers: Answers) -> Target:
    case = answers.line("quality", recommended(SHORT)).member.cases[0]
    ratio = bytes_over_plain(case)
    what = "tau 16, bytes of the run over plain EDiT's (estimated)"
    return Target(what, "<= 1.3", f"{ratio:.2f}", ratio <= 1.3)


def _muon_targets(answers: Answers) -> Iterator[Target]:
    line = answers.line("quality-muon", muon(recommended(SHORT)))
    what = "Muon, tau 16, relative to stock DDP with AdamW"
    yield _upper_bound_target(what, gap(line, answers.baseline), -0.02, line.planned)


def _bad_data_targets(answers: Answers) -> Iterator[Target]:
    checked, clean = (answers.line("quality-bursts", label) for label in (CHECKED, CLEAN))
    caught, bursts = bursts_caught(checked)
    yield Target(
        "bursts of random tokens rejected within one round of their begin",
        "all of them",
        f"{caught} of {bursts}" if bursts else "",
        caught == bursts if _has_loss_rejections(checked) else None,
    )
    rejected = [r for run in clean.records.values() for r in run.loss_rejections or ()]
    yield Target(
        "clean data rejected because of their loss",
        "never",
        str(len(rejected)) if clean.records else "",
        not rejected if _has_loss_rejections(clean) else None,
    )
    yield _upper_bound_target(
        "final loss with bursts, relative to clean data", gap(checked, clean), 0.005,
        checked.planned,
    )  # fmt: skip


def _has_loss_rejections(line: Line) -> bool:
    """Return whether all runs are finished and record the loss rejections."""
    recorded = [run for run in line.records.values() if run.loss_rejections is not None]
    return len(recorded) == line.planned


def bursts_caught(line: Line) -> tuple[int, int]:
    """Return how many bursts the loss check rejected within a round, and the number of bursts.

    Runs that do not record the loss rejections are not counted.
    """
    caught = bursts = 0
    for case in line.member.cases:
        run = line.records.get(case.seed)
        if run is None or run.loss_rejections is None or case.corruption is None:
            continue
        syncs = [it for it, replica in run.loss_rejections if replica == case.corruption.replica]
        for first, _ in case.corruption.bursts:
            bursts += 1
            caught += any(first <= iteration < first + case.tau for iteration in syncs)
    return caught, bursts


def _upper_bound_target(what: str, spread: Spread | None, bound: float, planned: int) -> Target:
    wanted = f"<= {bound:+.1%}"
    if spread is None:
        return Target(what, wanted, "", None)
    is_complete = spread.num == planned
    return Target(
        what, wanted, f"{spread.text('{:+.2%}'.format)}, {spread.num} of {planned} seeds",
        spread.mean <= bound if is_complete else None,
    )  # fmt: skip
