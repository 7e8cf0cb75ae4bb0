"""List all --edit-* flags of a training, in groups, with their defaults."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_edit.command_line import help_text
from megatron_edit.tools.cli.words import refuse_rest


def configure(parser: argparse.ArgumentParser) -> None:
    """Add no arguments: this subcommand has none."""


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Print the help text of a launch with all flags."""
    refuse_rest("flags", rest)
    sys.stdout.write(help_text(shows_all=True))
    return 0
