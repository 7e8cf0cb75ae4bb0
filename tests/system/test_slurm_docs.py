"""The commands of docs/slurm.md with stubs of SLURM's commands, which record their arguments."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.harness.launch import REPOSITORY
from tests.system.test_docs import commands_of_kind, run

STUB = '#!/bin/bash\necho "${0##*/}" "$@" >>"$CALLS"\n'


def test_documented_commands_submit_existing_scripts(tmp_path: Path) -> None:
    """Would catch a renamed batch script or setting, and nodes that do not reach sbatch."""
    calls = tmp_path / "calls"
    for name in ("sbatch", "scancel"):
        (tmp_path / name).write_text(STUB)
        (tmp_path / name).chmod(0o755)
    for command in commands_of_kind("slurm"):
        calls.write_text("")
        line = f"PATH={tmp_path}:$PATH; {command.line.replace('JOB', '7')}"
        run(["bash", "-c", line], CALLS=str(calls), EDIT_PYTHON=sys.executable)
        (made,) = calls.read_text().splitlines()
        if command.words[0] == "scancel":
            assert made == "scancel --batch --signal=USR1 7"
            continue
        script = REPOSITORY / made.split()[-1]
        assert script.is_file() and script.suffix == ".sbatch"
        is_het = script.stem in ("edit_per_replica", "a_edit_mixed")
        assert made.count(" : ") == (1 if is_het else 0), made
        if "EDIT_NODES=8" in command.line:
            assert "--nodes=8 --ntasks-per-node=8" in made and "--gpus-per-node=8" in made
            assert made.index("--time 1-00") < made.index("scripts/slurm")
