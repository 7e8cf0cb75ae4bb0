"""The command `megatron-edit`: one module per subcommand, each with `configure` and `run`."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from megatron_edit import __version__
from megatron_edit.errors import EditError, UsageError
from megatron_edit.tools.cli import (
    check,
    compare,
    doctor,
    flags,
    hub,
    init,
    inspect,
    patch,
    plan,
    report,
    watch,
)
from megatron_edit.tools.cli.words import OneLineParser

SUBCOMMANDS = {
    "init": init,
    "flags": flags,
    "check": check,
    "plan": plan,
    "patch": patch,
    "doctor": doctor,
    "inspect": inspect,
    "report": report,
    "watch": watch,
    "compare": compare,
    "hub": hub,
}
CLOSED_PIPE = 141  # 128 + SIGPIPE, as a shell reports a program that the signal ended
# Errors of the operating system that are caused by a given path, not by a bug.
PATH_ERRORS = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.ENAMETOOLONG, errno.EEXIST,
    errno.EISDIR, errno.ENOTDIR, errno.ENOENT, errno.EDQUOT, errno.ELOOP, errno.ESTALE, errno.EIO,
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit code.

    Args:
        argv: arguments after `megatron-edit`; None takes them from the process.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # here, as Python itself would print a closed pipe as an error
    except BrokenPipeError:  # as in `megatron-edit report RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE


def _run(argv: Sequence[str] | None) -> int:
    parser = OneLineParser(prog="megatron-edit", description="Tools of megatron_edit.")
    parser.add_argument("--version", action="version", version=f"megatron_edit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in SUBCOMMANDS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.configure(commands.add_parser(name, help=summary, description=summary))
    known, rest = parser.parse_known_args(sys.argv[1:] if argv is None else list(argv))
    try:
        return int(SUBCOMMANDS[known.command].run(known, rest))
    except EditError as error:
        refusal = error
    except OSError as error:
        if error.filename is None or error.errno not in PATH_ERRORS:
            raise
        rule = f"cannot be used ({error.strerror})"
        refusal = UsageError(
            str(error.filename), rule, "give another path, or correct its permissions"
        )
    sys.stderr.write(f"megatron-edit {known.command}: {refusal}\n")
    return refusal.exit_code
