"""Comparison of the members' results."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_edit.elastic.messages import Ready
from megatron_edit.elastic.refusals import Comparison, compare

UNITS = ("embedding", "layer.1", "layer.2", "layer.3", "layer.4", "final")
GOOD = Ready(1, 1, "plan", tuple("012345"), 0, (), units=UNITS)


def test_equal_results_can_be_committed() -> None:
    assert compare(dict.fromkeys("abc", GOOD)) == Comparison(True)


def test_units_that_differ_are_named() -> None:
    bad = replace(GOOD, digests=(*"0x2345",))
    found = compare({"a": GOOD, "b": bad, "c": GOOD})
    assert (found.is_good, found.is_split, found.differing) == (False, False, "b")
    assert found.units == ("layer.1",)
    assert found.reason == "the replicas' results differ in unit layer.1"
    all_bad = replace(GOOD, digests=tuple("yyyyyy"))
    assert compare({"a": GOOD, "b": all_bad}).reason == (
        "the replicas' results differ in units embedding, layer.1, layer.2, layer.3 and 2 more"
    )


def test_only_one_against_two_or_more_is_to_blame() -> None:
    bad, other = (replace(GOOD, digests=tuple(text)) for text in ("x12345", "y12345"))
    for results in ({"a": GOOD, "b": bad}, {"a": GOOD, "b": GOOD, "c": bad, "d": other}):
        found = compare(results)
        assert found.is_split and found.differing == ""


def test_units_without_names_are_numbered() -> None:
    first, second = (replace(GOOD, digests=digests, units=()) for digests in (("a",), ("b",)))
    assert compare({"a": first, "b": second}).reason.endswith("differ in unit number 0")


def test_plans_that_differ_are_named() -> None:
    found = compare({"a": GOOD, "b": replace(GOOD, plan="other"), "c": GOOD})
    assert found.differing == "b" and found.units == ()
    assert found.reason == "the replicas' results differ in the plan of the round"


CORRUPT = replace(GOOD, corrupt=("layer.2",))
BAD = replace(CORRUPT, digests=tuple("x12345"))


@pytest.mark.parametrize(
    "results",
    [
        {"a": CORRUPT, "b": CORRUPT},
        {"a": GOOD, "b": CORRUPT, "c": GOOD},
        {"a": GOOD, "b": BAD},  # of two, either may be right
        {"a": BAD, "b": GOOD, "c": BAD},  # the one that is right differs
        {"a": GOOD, "b": GOOD, "c": BAD, "d": replace(BAD, digests=tuple("y12345"))},
    ],
)
def test_corrupt_averages_are_nobodys_fault(results: dict[str, Ready]) -> None:
    """Would catch: a replica that is right is taken out; one flipped bit ends a run of two."""
    found = compare(results)
    assert (found.is_good, found.is_split, found.differing) == (False, False, "")
    assert found.units == ("layer.2",)
    assert found.reason == "the average is not that of the replicas' updates in unit layer.2"


def test_who_is_alone_with_a_corrupt_average_is_to_blame() -> None:
    found = compare({"a": GOOD, "b": BAD, "c": GOOD})
    assert (found.differing, found.units) == ("b", ("embedding",))
