"""docs/glossary.md: its terms, their order, and the code that it names."""

from __future__ import annotations

import re

from tests.harness.launch import REPOSITORY

TEXT = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.partition("|---|---|---|\n")[2].splitlines()
]
# Terms of README.md, docs/choosing.md and the help texts of the flags.
NEEDED = """A-EDiT, anchor, commit, delayed sync, drift, effective replicas, elastic run, epoch,
    event files, exposed time, final phase, fragment, heartbeat, hub, ideal speed, inner optimizer,
    joiner, landing, launch, lineage, meeting, member, outer optimizer, penalty, pseudo-gradient,
    replica, round, shard, stock Megatron, strategy, sync, tau, unit, warm-up, weight, wire type"""


def test_needed_terms_are_explained() -> None:
    """Would catch a term that was removed or renamed."""
    terms = {row[0].partition(",")[0].partition(" (")[0] for row in ROWS}
    assert {" ".join(term.split()) for term in NEEDED.split(",")} - terms == set()


def test_terms_are_in_alphabetical_order() -> None:
    """Would catch a term at a place where nobody looks for it."""
    terms = [row[0].lower() for row in ROWS]
    assert terms == sorted(terms)


def test_named_code_exists() -> None:
    """Would catch a class, a function or a file that was renamed."""
    package = REPOSITORY / "megatron_edit"
    for _, _, where in ROWS:
        for path in re.findall(r"`((?:\w+/)+\w+\.py)`", where):
            assert (package / path).is_file(), where
        for names, path in re.findall(r"`([\w.]+)` in `((?:\w+/)+\w+\.py)`", where):
            code = (package / path).read_text(encoding="utf-8")
            name = names.rpartition(".")[2]
            assert re.search(rf"\b(?:class|def) {name}\b", code), where
