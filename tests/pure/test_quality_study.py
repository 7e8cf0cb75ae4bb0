"""The study of the recommended settings: runs, fits, bytes, targets, and the user's page.

Would catch: a run without the recommended flags, a target that counts as reached with runs missing
or relative to the worse baseline, a fit of values instead of logarithms, a burst that counts
although it is left out too late, records of older runs that are no longer found.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from convergence_parts.answers import (
    PUBLISHED,
    Answers,
    bursts_caught,
    bytes_over_plain,
    bytes_per_parameter,
    exponent_of,
    fit_power_law,
    loss_ratio,
    make_targets,
)
from convergence_parts.cases import Case, Member, Question
from convergence_parts.expectations import draw_gaps, make_blocks, replace_blocks, tau_series
from convergence_parts.records import RunSummary, RunTable, loss_rejections
from convergence_parts.study import (
    BURSTS,
    CHECKED,
    CLEAN,
    CORRUPTED_REPLICA,
    DDP,
    DDP_LARGER_BETA2,
    HIDDEN_SIZES,
    RECOMMENDED,
    SAMPLES,
    UNCHECKED,
    Study,
    muon,
    plain,
    recommended,
    samples_labels,
    sizes_labels,
)

from megatron_edit.command_line import config_from_argv
from megatron_edit.tools.compare.flags import canonical
from tests.harness.launch import REPOSITORY

STUDY = Study()
QUESTIONS = {q.name: q for q in STUDY.questions if q.name.startswith("quality")}
PARAMETERS = 1_083_264  # of the model of the study
Results = Mapping[tuple[str, str], list[float]]


def summary(loss: float, **changes: Any) -> RunSummary:
    """The summary of a finished run that sent the bytes of stock DDP."""
    fields: dict[str, Any] = {
        "final_loss": loss, "bytes_per_step": 6.0 * PARAMETERS, "effective_replicas": 4.0,
        "left_out": [], "seconds": 1.0, "versions": {}, "loss_rejections": [],
    }  # fmt: skip
    return RunSummary(**fields | changes)


def member(question: str, label: str) -> Member:
    """The member of a question by its label."""
    return next(m for m in QUESTIONS[question].members if m.label == label)


def answers(results: Results, **changes: Any) -> Answers:
    """The answers to given losses, by question and label, for the first seeds."""
    found = {
        case.hash({}): summary(loss, **changes)
        for (question, label), losses in results.items()
        for case, loss in zip(member(question, label).cases, losses, strict=False)
    }
    return Answers(STUDY, lambda case: found.get(case.hash({})))


def verdicts(results: Results, **changes: Any) -> dict[str, bool | None]:
    """Whether each target is reached, by its description."""
    return {each.what: each.is_reached for each in make_targets(answers(results, **changes))}


# ---- the runs


def test_questions_are_in_order_of_priority() -> None:
    """They come after the questions whose labels other figures use."""
    assert list(QUESTIONS) == [
        "quality", "quality-bursts", "quality-samples", "quality-sizes", "quality-muon",
        "quality-choices",
    ]  # fmt: skip
    names = [question.name for question in STUDY.questions]
    assert max(i for i, n in enumerate(names) if n.startswith("marks")) < names.index("quality")


def test_bursts_with_and_without_loss_check_are_different_runs() -> None:
    """Would catch: a row of the loss check whose runs were made without it."""
    question = QUESTIONS["quality-bursts"]
    hashes = [case.hash({}) for member in question.members for case in member.cases]
    assert len(set(hashes)) == 9
    words = {member.label: member.cases[0].words for member in question.members}
    assert [label for label, own in words.items() if "--edit-no-loss-check" in own] == [UNCHECKED]


def test_claims_have_three_seeds_and_choices_one() -> None:
    three = (1, 2, 3)
    claimed = [
        ("quality", DDP), ("quality", DDP_LARGER_BETA2), ("quality", recommended(16)),
        ("quality", recommended(64)), ("quality-bursts", CLEAN), ("quality-bursts", CHECKED),
        ("quality-bursts", UNCHECKED), ("quality-muon", muon("ddp")),
        ("quality-muon", muon(recommended(16))), ("quality-muon", muon(recommended(64))),
    ]  # fmt: skip
    for question, label in claimed:
        assert tuple(case.seed for case in member(question, label).cases) == three, label
    for name in ("quality-samples", "quality-sizes", "quality-choices"):
        assert {case.seed for case in QUESTIONS[name].cases} == {1}
    assert {case.seed for q in Study(seeds=(7,)).questions for case in q.cases} == {7}


def test_recommended_flags_are_in_all_recommended_runs() -> None:
    """They set no strategy, warm-up, interval or evaluation, and no flag of Megatron."""
    names = [word for word in RECOMMENDED if word.startswith("--")]
    assert names == [
        "--edit-average-moments", "--edit-scale-beta2", "--edit-final-sync-fraction",
        "--edit-sync-dtype",
    ]  # fmt: skip
    for question in QUESTIONS.values():
        for each in question.members:
            if "recommended" in each.label or question.name == "quality-bursts":
                assert set(RECOMMENDED) <= set(each.cases[0].words), each.label


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_recommended_flags_are_valid(optimizer: str) -> None:
    words = ["--use-edit", "--edit-num-replicas", "4", "--optimizer", optimizer, *RECOMMENDED]
    config = config_from_argv(words)
    assert (config.use_edit, config.sync_dtype) == (True, "int8")


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=lambda question: question.name)
def test_all_runs_are_accepted_by_this_version(question: Question) -> None:
    """Catches: a flag that is spelled differently where it is parsed."""
    refusals = {each.label: each.cases[0].refusal for each in question.members}
    assert not any(refusals.values()), refusals


def test_plain_runs_of_earlier_questions_are_reused() -> None:
    """The plain rows are runs of earlier questions, which are not made again."""
    table = RunTable.read(REPOSITORY / "benchmarks" / "results" / "convergence.json")
    for label in (DDP, plain(16)):
        assert all(table.find(case) is not None for case in member("quality", label).cases)


def test_muon_runs_have_no_distributed_optimizer() -> None:
    """They have the chosen rate and scale, and explicit outer settings in place of presets."""
    words = canonical(member("quality-muon", muon(recommended(64))).cases[0].words)
    assert "--use-distributed-optimizer" not in words
    wanted = {"--optimizer": ["muon"], "--muon-extra-scale-factor": ["0.2"], "--lr": ["0.004"],
              "--edit-outer-lr": ["0.9"], "--edit-outer-momentum": ["0.6"],
              "--edit-sync-interval": ["64"]}  # fmt: skip
    assert words.items() >= wanted.items()
    adam = canonical(member("quality", recommended(64)).cases[0].words)
    assert "--use-distributed-optimizer" in adam


def test_flags_of_runs_by_size_and_samples() -> None:
    """The middle size and number of samples are runs of the claim, too."""
    for question, labels, name, values in (
        ("quality-samples", samples_labels, "--micro-batch-size", SAMPLES),
        ("quality-sizes", sizes_labels, "--hidden-size", HIDDEN_SIZES),
    ):
        for value in values:
            for label in labels(value):
                words = canonical(member(question, label).cases[0].words)
                assert words[name] == [str(value)]
    claim = member("quality", recommended(16)).cases[0].hash({})
    assert member("quality-samples", samples_labels(8)[1]).cases[0].hash({}) == claim
    assert member("quality-sizes", sizes_labels(192)[1]).cases[0].hash({}) == claim


# ---- fits


def test_published_scaling_law_as_quoted() -> None:
    """Four replicas lose 6 % at 1.1 million parameters and 1.2 % at a billion."""
    assert loss_ratio(PUBLISHED, 4, 1.1e6) - 1 == pytest.approx(0.06, abs=0.001)
    assert loss_ratio(PUBLISHED, 4, 1e9) - 1 == pytest.approx(0.012, abs=0.001)
    assert loss_ratio(PUBLISHED, 1, 1e6) == 1.0
    assert exponent_of(loss_ratio(PUBLISHED, 8, 1e7), 8) == pytest.approx(PUBLISHED.at(1e7))


def test_fit_finds_a_power_law() -> None:
    law = fit_power_law([(x, 0.5 * x**-1.5) for x in (1.0, 3.0, 10.0)])
    assert law is not None
    assert law.scale == pytest.approx(0.5) and law.exponent == pytest.approx(-1.5)
    law = fit_power_law([(1, 1.0), (10, 0.5), (10, -0.1)])  # through the mean of both gaps, 0.2
    assert law is not None
    assert law.scale == pytest.approx(1.0) and law.exponent == pytest.approx(np.log10(0.2), 1e-4)


def test_fit_needs_two_points_with_a_gap() -> None:
    assert fit_power_law([]) is None and fit_power_law([(1, 2), (1, 3)]) is None
    assert fit_power_law([(1, -0.2), (2, -0.1)]) is None  # better than data parallelism
    assert fit_power_law([(1, -0.1), (2, 2.0), (4, 2.0)]) is not None
    assert fit_power_law([(1, 0.0), (2, 2.0)]) is None  # steeper than any power


# ---- bytes


def test_bytes_per_parameter_equal_hand_computed_values() -> None:
    """6 bytes in fp32 both ways, a little over 1.5 in codes; 96 and 48 of 960 steps are dense."""
    code = 1.5 * (1 + 4 / 256)
    dense = 96 * 6.0
    assert bytes_per_parameter(member("quality", DDP).cases[0]) == 960 * 6.0
    assert bytes_per_parameter(member("quality", plain(16)).cases[0]) == dense + 54 * 6.0
    assert bytes_per_parameter(member("quality", plain(64)).cases[0]) == dense + 14 * 6.0
    found = bytes_per_parameter(member("quality", recommended(16)).cases[0])
    assert found == pytest.approx(dense + 48 * 6.0 + 51 * 3 * code, rel=0.002)
    ratio = bytes_over_plain(member("quality", recommended(16)).cases[0])
    assert 1.2 < ratio < 1.3


def test_moments_at_every_second_sync_cost_half_the_bytes() -> None:
    case = member("quality", recommended(16)).cases[0]
    less = replace(case, flags=(*case.flags, "--edit-average-moments-every", "2"))
    none = replace(case, flags=(*case.flags, "--edit-average-moments", "none"))
    full, half, zero = (bytes_per_parameter(each) for each in (case, less, none))
    assert (half - zero) / (full - zero) == pytest.approx(25 / 51)


def test_estimated_bytes_equal_those_of_recorded_runs() -> None:
    """The recorded runs of EDiT with fp32 and with int8."""
    table = RunTable.read(REPOSITORY / "benchmarks" / "results" / "convergence.json")
    wire = next(q for q in STUDY.questions if q.name == "marks-wire")
    for each in wire.members:
        if each.label.endswith(("16", "int8")):
            run = table.find(each.cases[0])
            assert run is not None
            counted = 96 * 6.0 + 864 * run.bytes_per_step / PARAMETERS
            assert bytes_per_parameter(each.cases[0]) == pytest.approx(counted, rel=0.005)


# ---- targets

ADAM = {
    ("quality", DDP): [3.1, 3.1, 3.1],
    ("quality", DDP_LARGER_BETA2): [3.0, 3.0, 3.0],
    ("quality", recommended(16)): [3.04, 3.05, 3.03],
    ("quality", recommended(64)): [3.17, 3.18, 3.17],
}  # fmt: skip
TAU_16, TAU_64 = (f"tau {tau}, 8 samples, relative to stock DDP" for tau in (16, 64))


def test_targets_are_open_without_runs() -> None:
    """Except for the bytes, which are computed from the flags."""
    found = verdicts({})
    assert {what for what, reached in found.items() if reached is not None} == {
        "tau 16, bytes of the run over plain EDiT's (estimated)"
    }
    assert len(found) == 8


def test_gaps_are_relative_to_the_better_baseline() -> None:
    """+1.3 % and +5.8 %; relative to the worse one they would be below zero and +2.4 %."""
    found = verdicts(ADAM)
    assert found[TAU_16] is True and found[TAU_64] is True
    worse = {**ADAM, ("quality", recommended(16)): [3.05, 3.06, 3.05]}
    assert verdicts(worse)[TAU_16] is False  # +1.8 %
    swapped = {**worse, ("quality", DDP): [2.9, 2.9, 2.9]}
    assert verdicts(swapped)[TAU_64] is False


def test_target_is_open_until_all_seeds_are_recorded() -> None:
    two = {**ADAM, ("quality", recommended(16)): [3.04, 3.05]}
    assert verdicts(two)[TAU_16] is None
    baseline = {**ADAM, ("quality", DDP_LARGER_BETA2): [3.0]}
    # A baseline with one seed does not replace one with three.
    assert answers(baseline).baseline == answers(ADAM).line("quality", DDP)


def test_target_of_muon_compared_with_adamw() -> None:
    name = "Muon, tau 16, relative to stock DDP with AdamW"
    label = ("quality-muon", muon(recommended(16)))
    assert verdicts({**ADAM, label: [2.93, 2.94, 2.94]})[name] is True
    assert verdicts({**ADAM, label: [2.95, 2.95, 2.95]})[name] is False


def burst_starts(case: Case) -> list[int]:
    """The first step of each burst."""
    assert case.corruption is not None
    return [first for first, _ in case.corruption.bursts]


def bad_data(rejections: Callable[[Case], list[list[int]] | None]) -> Answers:
    """The answers of finished runs with and without bursts, with given rejections."""
    found = {
        case.hash({}): summary(3.0, loss_rejections=rejections(case))
        for case in QUESTIONS["quality-bursts"].cases
    }
    return Answers(STUDY, lambda case: found.get(case.hash({})))


@pytest.mark.parametrize(("late", "caught"), [(0, 12), (15, 12), (16, 0), (-1, 0)])
def test_burst_counts_as_caught_only_within_a_round(late: int, caught: int) -> None:
    """Three seeds of four bursts; a rejection before the burst begins does not count."""

    def rejections(case: Case) -> list[list[int]]:
        if case.corruption is None:
            return []
        return [[first + late, CORRUPTED_REPLICA] for first in burst_starts(case)]

    found = bad_data(rejections)
    assert bursts_caught(found.line("quality-bursts", CHECKED)) == (caught, 3 * len(BURSTS))
    reached = {each.what: each.is_reached for each in make_targets(found)}
    what = "bursts of random tokens rejected within one round of their begin"
    assert reached[what] is (caught == 12)
    assert reached["clean data rejected because of their loss"] is True


def test_rejection_of_another_replica_does_not_count_as_caught() -> None:
    found = bad_data(
        lambda case: [[first, 0] for first in burst_starts(case)] if case.corruption else [[112, 2]]
    )
    assert bursts_caught(found.line("quality-bursts", CHECKED)) == (0, 12)
    reached = {each.what: each for each in make_targets(found)}
    clean = reached["clean data rejected because of their loss"]
    assert (clean.is_reached, clean.found) == (False, "3")


def test_targets_are_open_where_rejections_are_not_recorded() -> None:
    found = bad_data(lambda case: None)
    assert bursts_caught(found.line("quality-bursts", CHECKED)) == (0, 0)
    reached = {each.what: each.is_reached for each in make_targets(found)}
    assert reached["bursts of random tokens rejected within one round of their begin"] is None
    assert reached["clean data rejected because of their loss"] is None


def test_loss_rejections_are_read_from_syncs() -> None:
    """Reasons are by unit and replica; files without reasons give None."""
    syncs = [
        {"iteration": 112, "why": [[None, "loss", None], [None, "loss", "norm"]]},
        {"iteration": 128, "why": [[None, None, None], ["non-finite", None, None]]},
        {"iteration": 144, "why": [[None, None, "loss"], [None, None, "norm"]]},
    ]
    assert loss_rejections(syncs) == [[112, 1], [144, 2]]
    assert loss_rejections([{"iteration": 112}]) is None and loss_rejections([]) is None


# ---- the page


def test_page_shows_results_of_the_runs(tmp_path: Path) -> None:
    """All seeds of all runs, generated by power laws that the fits must recover."""
    results: dict[tuple[str, str], list[float]] = {**ADAM}
    for each in QUESTIONS["quality-muon"].members:
        results.setdefault(("quality-muon", each.label), [2.9, 2.9, 2.9])
    for label in (DDP, DDP_LARGER_BETA2):
        del results["quality-muon", label]  # as in `quality`
    for samples in SAMPLES:
        ddp, edit = samples_labels(samples)
        results["quality-samples", ddp] = [3.0]
        results["quality-samples", edit] = [3.0 + 0.32 / samples]
    found = answers(results)
    law = found.samples_law()
    assert law is not None
    assert law.scale == pytest.approx(0.32 / 3) and law.exponent == pytest.approx(-1.0)
    texts = make_blocks(found, "x.png")
    text = texts["expectations"]
    assert "Fit (least squares, 4 points): gap = 0.107 samples^-1.00." in text
    assert "| recommended, tau 16 | 3.0400 ± 0.0100 | +1.33% ± 0.33% | 1.22 | 3 |" in text
    assert "chosen with knowledge of the losses" in text
    assert "gap = 1.33% of the model above and N = 4, times (samples / 8)^-1.00" in text
    assert not any("None" in line for line in "".join(texts.values()).splitlines())
    assert set(tau_series(found)) == {"recommended setting", "recommended, Muon relative to Muon"}
    assert draw_gaps(tmp_path / "gaps.png", found)
    assert (tmp_path / "gaps.png").read_bytes().startswith(b"\x89PNG")
    assert not draw_gaps(tmp_path / "none.png", answers({}))


def test_estimate_multiplies_size_and_samples_laws() -> None:
    """The size law gives the exponent of N, the samples law a power, tau a factor."""
    results: dict[tuple[str, str], list[float]] = {**ADAM}
    for samples in SAMPLES:
        ddp, edit = samples_labels(samples)
        results["quality-samples", ddp] = [3.0]
        results["quality-samples", edit] = [3.0 * (1 + 0.1 / samples)]
    found: dict[str, RunSummary] = {}
    for hidden in HIDDEN_SIZES:
        base, case = (member("quality-sizes", label).cases[0] for label in sizes_labels(hidden))
        found[base.hash({})] = summary(3.0, bytes_per_step=6.0 * hidden * 1000)
        found[case.hash({})] = summary(3.0 * 4 ** (2.0 * (hidden * 1000) ** -0.3))
    several = answers(results)
    both = Answers(STUDY, lambda case: found.get(case.hash({})) or several._find(case))
    size_law = both.size_law()
    assert size_law is not None
    assert size_law.scale == pytest.approx(2.0) and size_law.exponent == pytest.approx(-0.3)
    text = make_blocks(both, "")["expectations"]
    assert "gap = (N^(2 P^-0.300) - 1), times (samples / 8)^" in text and "![" not in text


def test_generated_blocks_of_the_page_are_replaced() -> None:
    page = "a\n<!-- x: made by benchmarks/convergence.py --report -->\nold\n<!-- end of x -->\nb\n"
    once = replace_blocks(page, {"x": "new \\1"})
    assert "old" not in once and "\nnew \\1\n" in once and once.endswith("-->\nb\n")
    assert replace_blocks(once, {"x": "new \\1"}) == once
    with pytest.raises(ValueError, match="must have a part"):
        replace_blocks(page, {"y": "new"})
