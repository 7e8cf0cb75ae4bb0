"""docs/glossary.md: its terms, and their order."""

from __future__ import annotations

from tests.harness.launch import REPOSITORY

TEXT = (REPOSITORY / "docs" / "glossary.md").read_text(encoding="utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.partition("|---|---|\n")[2].partition("\n\n")[0].splitlines()
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
