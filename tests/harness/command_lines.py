"""Running many command lines in one process, which imports torch and Megatron once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness.launch import REPOSITORY

Outcome = tuple[object, str]  # exit code, or what was raised instead; and stderr

_SECONDS = 110
_RUNNER = """
import contextlib, io, json, sys
import megatron_edit.__main__ as launcher
from megatron_edit.tools.cli import main
from tests.harness.privileges import apply_file_modes
lines, file_modes_apply = json.load(sys.stdin)
if file_modes_apply:
    apply_file_modes()
found = []
for argv in lines:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = launcher.main(argv[1:]) if argv[:1] == ["launch"] else main(argv)
        except SystemExit as stop:
            code = stop.code
        except BaseException as error:
            code = repr(error)
    found.append((code, err.getvalue(), out.getvalue()))
sys.__stdout__.write("RESULT" + json.dumps(found))
"""


def outcomes_of(
    lines: Mapping[str, Sequence[str]], folder: Path, *, file_modes_apply: bool = False,
    env: Mapping[str, str] | None = None, seconds: float = _SECONDS,
) -> dict[str, Outcome]:  # fmt: skip
    """Return exit code and stderr of each command line; arguments as for `outputs_of`."""
    found = outputs_of(lines, folder, file_modes_apply=file_modes_apply, env=env, seconds=seconds)
    return {name: (code, errors) for name, (code, errors, _) in found.items()}


def outputs_of(
    lines: Mapping[str, Sequence[str]], folder: Path, *, file_modes_apply: bool = False,
    env: Mapping[str, str] | None = None, seconds: float = _SECONDS,
) -> dict[str, tuple[object, str, str]]:  # fmt: skip
    """Return exit code, stderr and stdout of each command line.

    Args:
        lines: by name, the arguments of `megatron-edit`, or `launch` and those of the launcher.
        folder: working directory.
        file_modes_apply: whether file modes apply even if root runs the tests.
        env: additions to the environment.
        seconds: time-out for all command lines together.
    """
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        input=json.dumps((list(lines.values()), file_modes_apply)), cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), **(env or {})},
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.partition("RESULT")[2])
    return dict(zip(lines, map(tuple, found), strict=True))
