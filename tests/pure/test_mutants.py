"""The catalog of mutants and its runner (``tests/mutants``), without a run of all mutants."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants.catalog import MUTANTS
from tests.mutants.mutant import Mutant, SnippetError
from tests.mutants.run import ERROR, KILLED, ROOT, SURVIVED, chosen, main, outcome_of

SMALL = "pure/test_clock.py::test_trigger_fires_one_step_ahead"


def test_catalog_matches_sources_and_tests() -> None:
    """Every snippet occurs once, every test exists, and ids and bugs are unique."""
    for mutant in MUTANTS:
        assert mutant.text(ROOT)
        for node in filter(None, (mutant.test, mutant.full)):
            file, _, name = node.partition("[")[0].partition("::")
            text = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name or 'test_'}", text, re.MULTILINE), node
        assert bool(mutant.full) == bool(mutant.why), f"{mutant.id}: a survivor must have a reason"
    assert max(Counter(mutant.id for mutant in MUTANTS).values()) == 1
    assert max(Counter(mutant.bug for mutant in MUTANTS).values()) == 1
    assert len(MUTANTS) >= 66
    areas = {mutant.area for mutant in MUTANTS}
    assert areas == {
        "method", "comm", "engine", "elastic", "checkpoint", "observe", "config", "host"
    }  # fmt: skip


def test_missing_or_ambiguous_snippet_is_an_error(tmp_path: Path) -> None:
    """Would catch a mutant that changes nothing, or more than one place."""
    (tmp_path / "megatron_edit").mkdir()
    (tmp_path / "megatron_edit" / "file.py").write_text("a = b + b\n")
    mutant = Mutant("method/made-up", "none", "file.py", "a = b", "a = -b", SMALL)
    assert mutant.text(tmp_path) == "a = -b + b\n"
    for changes in ({"old": "c"}, {"old": "b"}, {"new": "a = b"}, {"file": "gone.py"}):
        with pytest.raises(SnippetError, match="method/made-up"):
            dataclasses.replace(mutant, **changes).text(tmp_path)


def test_mutant_runs_in_a_copy_that_is_restored(tmp_path: Path) -> None:
    """A mutant is killed if the test fails in the copy, and survives if it passes.

    Would catch a runner that tests the repository itself, or reports a mutant as killed if pytest
    could not start.
    """
    out = tmp_path / "out.json"
    assert main(["method/clock-asks-late", "--out", str(out)]) == 0
    (found,) = json.loads(out.read_text())
    assert (found["id"], found["result"], found["test"]) == (
        "method/clock-asks-late",
        KILLED,
        SMALL,
    )
    (mutant,) = chosen(["method/clock-asks-late"], "core")
    copy = tmp_path / "copy"
    for name in ("pyproject.toml", "tests/conftest.py", "tests/harness/shares.py",
                 f"tests/{SMALL.partition(':')[0]}",
                 "tests/harness/__init__.py", "megatron_edit/__init__.py",
                 "megatron_edit/method/__init__.py", f"megatron_edit/{mutant.file}"):  # fmt: skip
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((ROOT / name).read_bytes())
    (copy / "tests/harness/__init__.py").write_text("def shut_down() -> None: ...\n")
    harmless = dataclasses.replace(mutant, new="return self.length <= now + step")
    before = (copy / "megatron_edit" / mutant.file).read_text()
    assert outcome_of(harmless, copy).result == SURVIVED
    assert outcome_of(dataclasses.replace(mutant, test=f"{SMALL}_not"), copy).result == ERROR
    assert outcome_of(dataclasses.replace(mutant, old="gone"), copy).result == ERROR
    assert (copy / "megatron_edit" / mutant.file).read_text() == before


def test_unknown_mutant_name_is_refused() -> None:
    with pytest.raises(SystemExit, match="no such mutant or area: methods"):
        chosen(["methods"], "core")
