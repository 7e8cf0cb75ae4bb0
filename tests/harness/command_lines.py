"""Many command lines in one process, which imports torch and Megatron once."""

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
# Imports come before the change of user: they may lie where nobody else may look.
_RUNNER = """
import contextlib, io, json, os, sys
import megatron_edit.__main__ as launcher
from megatron_edit.tools.cli import main
import megatron_edit.tools.doctor.launch, megatron_edit.tools.plan.plan
import megatron_edit.tools.compare.flags
lines, user = json.load(sys.stdin)
if user is not None:
    os.seteuid(user)
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
    lines: Mapping[str, Sequence[str]], folder: Path, *, user: int | None = None,
    env: Mapping[str, str] | None = None, seconds: float = _SECONDS,
) -> dict[str, Outcome]:  # fmt: skip
    """Exit code and stderr of each; arguments as of `printed_by`."""
    found = printed_by(lines, folder, user=user, env=env, seconds=seconds)
    return {name: (code, errors) for name, (code, errors, _) in found.items()}


def printed_by(
    lines: Mapping[str, Sequence[str]], folder: Path, *, user: int | None = None,
    env: Mapping[str, str] | None = None, seconds: float = _SECONDS,
) -> dict[str, tuple[object, str, str]]:  # fmt: skip
    """Exit code, stderr and stdout of each.

    Args:
        lines: by name: words after `megatron-edit`, or `launch` and those after the launcher.
        folder: where they run.
        user: who runs them; None is who runs the tests.
        env: further environment.
        seconds: after which all are given up.
    """
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER],
        input=json.dumps((list(lines.values()), user)), cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), **(env or {})},
        capture_output=True, text=True, timeout=seconds, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.partition("RESULT")[2])
    return dict(zip(lines, map(tuple, found), strict=True))
