"""`scripts/compare_surfaces.py`: content of a record, and differences between records.

Would catch: a record that depends on the clock or on its folder, a difference that is not reported.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from compare_surfaces import REPOSITORY, differences, keys_and_types, main, make_surfaces
from made_up_events import TRAININGS, write_training

from megatron_edit.errors import UsageError
from megatron_edit.tools.cli import SUBCOMMANDS


def test_all_subcommands_are_recorded() -> None:
    names = [surface.name for surface in make_surfaces()]
    assert len(names) == len(set(names))
    assert {f"help-{name}" for name in SUBCOMMANDS} <= set(names)
    assert {f"report-{name}" for name in TRAININGS} <= set(names)


def test_two_records_of_one_checkout_are_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A changed line and a missing surface are reported as differences."""
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        chosen = ["--only", "watch-warmup", "refused-report-empty"]
        assert main(["record", "--package", str(REPOSITORY), "--out", str(out), *chosen]) == 0
    assert main(["compare", str(first), str(second)]) == 0
    text = (first / "watch-warmup").read_text()
    assert text.startswith("exit code 0\n") and "edit  running" in text
    assert (first / "refused-report-empty").read_text().startswith("exit code 2\n")
    (second / "watch-warmup").write_text(text.replace("running", "lost"))
    (second / "refused-report-empty").unlink()
    capsys.readouterr()
    assert main(["compare", str(first), str(second)]) == 1
    missing, changed = differences(first, second)
    assert missing == f"refused-report-empty: not in {second}"
    assert changed.startswith("watch-warmup, line 2:\n  edit  running")
    assert changed in capsys.readouterr().out


def test_generated_event_files_are_reproducible(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_training(tmp_path / name, TRAININGS["resumed"])
    for path in (tmp_path / "one").iterdir():
        other = tmp_path / "two" / path.name
        assert path.read_bytes() == other.read_bytes()
        assert path.stat().st_mtime == other.stat().st_mtime


def test_machine_dependent_values_are_reduced_to_types() -> None:
    text = keys_and_types('{"a": [{"b": 1}, {"b": 2}], "c": {"d": null}}')
    assert "".join(text.split()) == '{"a":["{\\"b\\":\\"int\\"}"],"c":{"d":"NoneType"}}'


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    for words in (
        ["record", "--package", str(REPOSITORY), "--out", str(tmp_path)],
        ["record", "--package", str(tmp_path), "--out", str(tmp_path / "new")],
        ["compare", str(tmp_path), str(tmp_path / "none")],
    ):
        with pytest.raises(UsageError):
            main(words)
