"""Comparison of the members' results."""

from __future__ import annotations

from dataclasses import replace

from megatron_edit.elastic.messages import Ready
from megatron_edit.elastic.results import compare

UNITS = ("embedding", "layer.1", "layer.2", "layer.3", "layer.4", "final")
GOOD = Ready(1, 1, "plan", tuple("012345"), 0, (), units=UNITS)


def test_equal_results_can_be_committed() -> None:
    found = compare(dict.fromkeys("abc", GOOD))
    assert (found.differing, found.num_agreeing, found.reason) == ((), 3, "")


def test_units_that_differ_are_named() -> None:
    bad = replace(GOOD, digests=(*"0x2345",))
    found = compare({"a": GOOD, "b": bad, "c": GOOD})
    assert (found.differing, found.num_agreeing) == (("b",), 2)
    assert found.units == ("layer.1",)
    assert found.reason == "the replicas' results differ in unit layer.1"
    all_bad = replace(GOOD, digests=tuple("yyyyyy"))
    assert compare({"a": GOOD, "b": all_bad}).reason == (
        "the replicas' results differ in units embedding, layer.1, layer.2, layer.3 and 2 more"
    )


def test_units_without_names_are_numbered() -> None:
    first, second = (replace(GOOD, digests=digests, units=()) for digests in (("a",), ("b",)))
    assert compare({"a": first, "b": second}).reason.endswith("differ in unit number 0")


def test_plans_that_differ_are_named() -> None:
    found = compare({"a": GOOD, "b": replace(GOOD, plan="other"), "c": GOOD})
    assert found.differing == ("b",) and found.units == ()
    assert found.reason == "the replicas' results differ in the plan of the round"


def test_corrupt_averages_are_nobodys_fault() -> None:
    """Any member that finds one suffices; where results differ, too, that comes first."""
    corrupt = replace(GOOD, corrupt=("layer.2",))
    found = compare({"a": GOOD, "b": corrupt, "c": GOOD})
    assert (found.differing, found.units) == ((), ("layer.2",))
    assert found.reason == "the average is not that of the replicas' updates in unit layer.2"
    bad = replace(corrupt, digests=tuple("x12345"))
    assert compare({"a": GOOD, "b": bad, "c": GOOD}).differing == ("b",)
