"""Functions that several subcommands share."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from megatron_edit.errors import UsageError, to_one_line


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, without the usage, and exit with 2."""
        self.exit(2, to_one_line(f"{self.prog}: {message}; see --help") + "\n")


def option(name: str) -> str:
    """Return the option that argparse stores under a name."""
    return "--" + name.replace("_", "-")


def refuse_rest(command: str, rest: Sequence[str]) -> None:
    """Refuse unknown arguments of a subcommand that takes no training command.

    Raises:
        UsageError: there are some.
    """
    if rest:
        raise UsageError(
            " ".join(rest), f"is not an argument of {command}", f"see {command} --help"
        )


def search_megatron_as_launch(folder: Path | None) -> None:
    """Search for Megatron in the script's folder, then in the current one, as a launch does.

    `python -m`, by which `torchrun` starts the launcher, has the current folder on its path; the
    command `megatron-edit` has not, and would find an installed wheel instead of a clone.

    Args:
        folder: of the script; None without one.
    """
    first = [] if folder is None else [str(folder.resolve())]
    first += [] if sys.flags.safe_path else [""]
    sys.path[:] = [*first, *(path for path in sys.path if path not in first)]


def check_installed(*names: str) -> None:
    """Check that libraries of the extra `report` are installed.

    Raises:
        UsageError: one is missing.
    """
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"{', '.join(missing)} (not installed)",
            "needed for pictures, page and progress",
            "pip install 'megatron_edit[report]'",
        )
