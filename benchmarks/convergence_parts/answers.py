"""What the runs say about the recommended setting: losses beside those of stock DDP."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from megatron_edit.comm.collectives import all_reduce_payload
from megatron_edit.tools.compare.statistics import Spread, quotients

from .analysis import Find, Line, make_lines
from .fit import PowerLaw, exponent_of, fit_power_law
from .quality import (
    DDP,
    DDP_LARGER_BETA2,
    HIDDEN_SIZES,
    SAMPLES,
    samples_labels,
    sizes_labels,
)
from .study import NUM_REPLICAS, Study

GRADIENT_BYTES = all_reduce_payload(4 << 20, NUM_REPLICAS) / (1 << 20)  # of a parameter and step


class Answers:
    """Finished runs of the questions, by label.

    Args:
        study: all questions.
        find: finished runs.
    """

    def __init__(self, study: Study, find: Find) -> None:
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
        """A member of a question, as far as its runs are finished."""
        return self._lines[question, label]

    def lines(self, question: str) -> list[Line]:
        """All members of a question."""
        return [line for (name, _), line in self._lines.items() if name == question]

    @cached_property
    def baseline(self) -> Line | None:
        """Stock DDP with AdamW at the better beta2 of those that are finished; None of none."""
        known = [
            (line.loss.num, -line.loss.mean, line)
            for line in (self.line("quality", label) for label in (DDP, DDP_LARGER_BETA2))
            if line.loss is not None
        ]
        # More seeds first: a single seed does not decide against three.
        return max(known, key=lambda item: item[:2])[2] if known else None

    def sample_gaps(self) -> list[tuple[float, float]]:
        """Samples of a replica in a step, and the gap of the recommended setting, one seed."""
        found = ((samples, self._gap("quality-samples", samples_labels(samples)))
                 for samples in SAMPLES)  # fmt: skip
        return [(samples, spread.mean) for samples, spread in found if spread is not None]

    def size_gaps(self) -> list[tuple[float, float]]:
        """Parameters of the model, and the gap of the recommended setting, one seed."""
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
        """Gap as a power of the samples of a replica in a step."""
        return fit_power_law(self.sample_gaps())

    def size_law(self) -> PowerLaw | None:
        """Exponent of N as a power of the number of parameters, as the published law has it."""
        points = [(numel, exponent_of(1 + gap, NUM_REPLICAS)) for numel, gap in self.size_gaps()]
        return fit_power_law(points)


def gap(line: Line, base: Line | None) -> Spread | None:
    """Loss over that of another member, less 1, for the seeds that both have; None of none."""
    if base is None:
        return None
    losses, others = (
        {seed: record.final_loss for seed, record in each.records.items()} for each in (line, base)
    )
    return Spread.of([ratio - 1 for ratio in quotients(losses, others)])


def num_parameters(ddp: Line) -> int | None:
    """Of the model, from the computed bytes of a step of stock DDP; None where it has no run."""
    sent = ddp.bytes_per_step
    return None if sent is None else round(sent.mean / GRADIENT_BYTES)
