"""The output of `megatron-edit check` for valid command lines and for flags of a script."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import Flags
from tests.harness.command_lines import outputs_of
from tests.harness.launch import REPOSITORY
from tests.harness.torch_groups import HAS_GROUPS
from tests.host.runs import edit_flags
from tests.system.check_lines import EDIT_OFF, corpus, write_corpus

SCRIPT = REPOSITORY / "scripts" / "pretrain_gpt.py"
OVERLAP: Flags = {"overlap_param_gather": True, "overlap_grad_reduce": True}
# Flags, texts that stdout must contain, and texts that it must not contain.
CASES: dict[str, tuple[Flags, list[str], list[str]]] = {
    "plain": (
        {},
        ["ok: 2 replicas x 1 ranks, strategy edit", "batch of a replica: 4 of 8 samples",
         "in 2 micro-batches of 2 on each of its 1 data-parallel ranks",
         "sync mode blocking (--edit-sync-mode auto)"],
        ["mid-round", "not checked", "bucket"],
    ),
    "overlap": (OVERLAP, ["sync mode overlap", "--ddp-bucket-size is not given"], []),
    "bucket": (OVERLAP | {"ddp_bucket_size": 100}, ["sync mode overlap"], ["bucket"]),
    "mid-round": (
        {"eval_iters": 1, "eval_interval": 4, "save": "new", "save_interval": 3},
        ["--eval-interval 4: falls in mid-round", "W + k tau = 2 + k x 3",
         "--save-interval 3: falls in mid-round"],
        [],
    ),
    "at-syncs": (
        {"eval_iters": 1, "eval_interval": 5, "edit_warmup_steps": 5, "edit_sync_interval": 5,
         "save": "new", "save_interval": 5},
        ["ok:"], ["mid-round"],
    ),
    "endless": ({"edit_warmup_steps": 10}, ["EDiT never starts"], []),
    "corpus": (corpus("good"), ["corpus: 1 x .idx and .bin, 4000 tokens", "all of it read"], []),
    "stock": (EDIT_OFF, ["ok: stock Megatron on 2 ranks"], ["sync mode"]),
}  # fmt: skip
if HAS_GROUPS:
    CASES["elastic"] = (
        {**OVERLAP, "edit_num_replicas": None, "edit_hub": "127.0.0.1:29600",
         "edit_replica_name": "spot-1", "edit_nominal_replicas": 4, "global_batch_size": 16,
         "eval_iters": 1, "eval_interval": 4},
        ["ok: replica spot-1 of an elastic run, which begins with 4 replicas x 2 ranks",
         "batch of a replica: 4 of 16 samples", "sync mode blocking (--edit-sync-mode auto)",
         "not checked: whether a hub answers at 127.0.0.1:29600"],
        ["mid-round"],
    )  # fmt: skip
# A script with flags of its own, which it adds to the parser (%r is True) or ignores.
OWN = """
import argparse
from megatron.training import pretrain
from megatron.training.arguments import parse_and_validate_args
def add(parser):
    parser.add_argument("--num-layer", type=int)
    return parser
if %r:
    parse_and_validate_args(add)
else:
    parse_and_validate_args(ignore_unknown_args=True)
pretrain(None, None, None, None)
raise SystemExit("it trains")
"""
WITHOUT_MEGATRON_LOOP = "import megatron.training\nprint('by myself')\n"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[object, str, str]]:
    """Run all command lines in one process; return exit code, stderr and stdout of each."""
    folder = tmp_path_factory.mktemp("lines")
    write_corpus(folder / "good")
    (folder / "adds.py").write_text(OWN % True)
    (folder / "ignores.py").write_text(OWN % False)
    (folder / "alone.py").write_text(WITHOUT_MEGATRON_LOOP)
    lines = {name: _line(SCRIPT, edit_flags(2, **flags)) for name, (flags, _, _) in CASES.items()}
    extra = ["--num-layer", "3", "--of-mine", "4"]
    lines["adds"] = _line(folder / "adds.py", edit_flags(2) + extra[:2])
    lines["ignores"] = _line(folder / "ignores.py", edit_flags(2) + extra)
    lines["alone"] = _line(folder / "alone.py", edit_flags(2))
    (folder / "own.args").write_text("\n".join(["# a file of flags", *edit_flags(2)]))
    lines["file"] = ["check", str(folder / "own.args"), "--world-size", "2", "--link", "10Gbit"]
    before = sorted(folder.rglob("*"))
    found = outputs_of(lines, folder)
    assert sorted(p for p in folder.rglob("*") if "__pycache__" not in p.parts) == before
    return found


def _line(script: Path, words: list[str]) -> list[str]:
    return ["check", str(script), *words, "--world-size", "2"]


@pytest.mark.parametrize("name", CASES)
def test_check_describes_run_without_side_effects(
    name: str, outputs: dict[str, tuple[object, str, str]]
) -> None:
    """Would catch missing descriptions, needless remarks, and files that `check` creates."""
    code, errors, out = outputs[name]
    assert (code, errors) == (0, ""), errors
    _, holds, lacks = CASES[name]
    assert all(text in out for text in holds), out
    assert not any(text in out for text in lacks), out


def test_flags_are_checked_without_script(outputs: dict[str, tuple[object, str, str]]) -> None:
    """With a wheel by themselves, with a clone by its pretrain_gpt.py; the output says which."""
    code, errors, out = outputs["file"]
    assert (code, errors) == (0, ""), errors
    first, second = out.splitlines()[:2]
    assert first == "ok: 2 replicas x 1 ranks, strategy edit"
    assert second.startswith("no script is given: ") and "not checked" not in out


def test_flags_added_by_script_are_accepted(outputs: dict[str, tuple[object, str, str]]) -> None:
    """They are known, even if similar to a flag of Megatron. Would catch a parser without them."""
    code, errors, out = outputs["adds"]
    assert (code, errors) == (0, "") and "num-layer" not in out


def test_flags_ignored_by_script_are_accepted_and_named(
    outputs: dict[str, tuple[object, str, str]],
) -> None:
    """They are accepted as in a launch."""
    code, errors, out = outputs["ignores"]
    assert (code, errors) == (0, "")
    assert "not checked (unknown to Megatron): --num-layer 3 --of-mine 4" in out


def test_script_without_megatron_loop_is_refused(
    outputs: dict[str, tuple[object, str, str]],
) -> None:
    """As in a launch: otherwise its replicas would silently train separately."""
    code, errors, _ = outputs["alone"]
    assert code == 2 and "did not train through megatron.training.pretrain" in errors


@pytest.mark.timeout(300)
def test_command_finds_clone_in_current_folder(tmp_path: Path) -> None:
    """As a launch there does. Would catch a report on the wheel that is also installed."""
    spec = importlib.util.find_spec("megatron")
    assert spec is not None and spec.submodule_search_locations is not None
    clones = tmp_path / "one", tmp_path / "two"
    for clone in clones:
        clone.mkdir()
        (clone / "megatron").symlink_to(next(iter(spec.submodule_search_locations)))
        shutil.copy(SCRIPT, clone)
    one, two = (clone / SCRIPT.name for clone in clones)
    for words, found in (
        ([], f"checked with Megatron's, {one}\n"),
        ([], f" in {one.parent}, supported as "),
        ([str(two)], f" in {two.parent}, supported as "),
    ):
        program = str(Path(sys.executable).with_name("megatron-edit"))
        command = [program, "check", *words, *edit_flags(2), "--world-size", "2"]
        done = subprocess.run(
            command, cwd=one.parent, capture_output=True, text=True, timeout=90, check=False
        )
        assert done.returncode == 0 and found in done.stdout, done
