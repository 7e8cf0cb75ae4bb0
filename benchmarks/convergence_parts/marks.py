"""The questions that ask for EDiT's marks, which come before all others."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from .corruption import LABELS, TEXT
from .questions import Member, Question

if TYPE_CHECKING:
    from .study import Study

BATCHES = (4, 8, 16)  # samples of a replica in a step
# As where the speed of delayed syncs is measured: overlap_parts/kinds.py. With a fragment for each
# unit the largest one decides how many steps hide an exchange; all at once need more.
DELAYED_TAU, DELAYS = 40, ((4, 8), (4, 12), (1, 15), (1, 30))  # fragments and steps
# Calmer outer steps, as they carry on what is late; with the delay and without it.
CALM = ("outer-momentum 0.7", "--edit-outer-momentum", "0.7")
CALMER = (
    ("outer-momentum 0.6", "--edit-outer-momentum", "0.6"),
    ("outer-momentum 0.5", "--edit-outer-momentum", "0.5"),
    ("outer-lr 1, outer-momentum 0.5", "--edit-outer-lr", "1", "--edit-outer-momentum", "0.5"),
)
CALM_DELAYS = ((4, 8), (4, 10))  # of the calm ones, which are of several seeds
BAD_DATA = {
    TEXT: ("marks-bursts", "random tokens"),
    LABELS: ("marks-labels", "text with random labels"),
}


def marks(study: Study) -> tuple[Question, ...]:
    """In order of priority. Most runs are of later questions, too."""
    bad = (_bursts(study, TEXT), _bursts(study, LABELS))
    return (_rivals(study), _batch(study), _wire(study), *bad, _delay(study))


def _rivals(study: Study) -> Question:
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
    """The noise of a replica's own steps, which DDP averages at once."""
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


def _delay(study: Study) -> Question:
    edit = f"edit, tau {DELAYED_TAU}"

    def late(fragments: int, delay: int, also: str = "", *words: str) -> Member:
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
    for where in CALM_DELAYS:
        members += [late(*where, *CALM), late(*where, f"{CALM[0]}, int8", *CALM[1:], *int8)]
    members += [late(*where) for where in DELAYS]
    members += [
        late(4, 12, "mix 0.5", "--edit-mix", "0.5"),
        late(4, 12, *CALMER[0]),
        late(*DELAYS[-1], "int8", *int8),
    ]
    members += [late(*DELAYS[0], *words) for words in CALMER]
    members += [
        study.member(f"{edit}, {label}", "edit", *words, base=edit, tau=DELAYED_TAU)
        for label, *words in (CALM, CALMER[0])
    ]
    return Question("marks-delay", "Delayed syncs", tuple(members))


def _bursts(study: Study, kind: str) -> Question:
    names = ("ddp", "diloco", "post-local-sgd")
    members = (study.member("edit", "edit"), *(study.member(n, n, base="edit") for n in names))
    name, bad = BAD_DATA[kind]
    title = f"One of four replicas fed {bad} in bursts: the strategies"
    return Question(name, title, tuple(study.corrupted(member, kind) for member in members))
