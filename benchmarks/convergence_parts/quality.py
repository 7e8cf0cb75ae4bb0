"""The questions about the recommended setting, `configs/edit_quality.args`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from frame.launch import REPOSITORY

from megatron_edit.tools.compare.flags import read_flags

from .cases import MUON
from .questions import Member, Question

if TYPE_CHECKING:
    from .study import Study

RECOMMENDED = tuple(read_flags(REPOSITORY / "configs" / "edit_quality.args"))
LARGER_BETA2 = "0.9873"  # 0.95 ** (1 / 4), that of each of four replicas with --edit-scale-beta2
DDP, DDP_LARGER_BETA2 = "ddp, beta2 0.95", f"ddp, beta2 {LARGER_BETA2}"
SHORT, LONG = 16, 64  # sync intervals
SAMPLES = (4, 8, 16, 32)  # of a replica in a step
HIDDEN_SIZES = (96, 192, 384)
MUON_FLAGS = ("--optimizer", MUON, "--muon-fp32-matmul-prec", "high")
# Chosen after the losses with it and without it were seen, as the page says.
MUON_SCALE = "0.2"
MUON_RATES = (2e-3, 4e-3)
MUON_RATE = 4e-3  # the better one with that scale
MUON_OUTER = ("--edit-outer-lr", "0.9", "--edit-outer-momentum", "0.6")
FINAL_SHARES = ("0.025", "0.05", "0.1")
CLEAN, CHECKED, UNCHECKED = "clean", "bursts, loss check", "bursts, no loss check"


def plain(tau: int) -> str:
    """Label of EDiT with nothing else said."""
    return f"edit, tau {tau}"


def recommended(tau: int) -> str:
    """Label of EDiT with the recommended setting."""
    return f"recommended, tau {tau}"


def muon(label: str) -> str:
    """Label of the same with Muon, at the rate and the scale of the claim."""
    return f"muon, {label}"


def quality(study: Study) -> tuple[Question, ...]:
    """All of them, in order of priority."""
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
    """Labels of stock DDP and of the recommended setting with so many samples."""
    return f"ddp, {samples} samples", f"recommended, {samples} samples"


def _samples(study: Study) -> Question:
    members = []
    for samples in SAMPLES:
        size = replace(study.size, micro_batch_size=samples)
        members += _pair(study, samples_labels(samples), size=size)
    title = "Samples of a replica in a step, recommended setting, tau 16"
    return Question("quality-samples", title, tuple(members))


def sizes_labels(hidden_size: int) -> tuple[str, str]:
    """Labels of stock DDP and of the recommended setting with such a model."""
    return f"ddp, hidden size {hidden_size}", f"recommended, hidden size {hidden_size}"


def _sizes(study: Study) -> Question:
    members = []
    for hidden_size in HIDDEN_SIZES:
        size = replace(study.size, hidden_size=hidden_size)
        members += _pair(study, sizes_labels(hidden_size), size=size)
    title = "Size of the model, recommended setting, tau 16"
    return Question("quality-sizes", title, tuple(members))


def _pair(study: Study, labels: tuple[str, str], **changes: Any) -> list[Member]:
    """One seed of stock DDP with the larger beta2, and of the recommended setting."""
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
    """Each part of the recommended setting alone, and parts of it together, in fp32."""
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
