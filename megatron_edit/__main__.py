"""``python -m megatron_edit SCRIPT ...``: see `megatron_edit.launcher`.

Where SCRIPT is the name of a subcommand of `megatron-edit`, and no file, it is that command.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_edit import launcher

DOCTOR = "doctor"  # the one command that looks at all ranks of a launch


def main(argv: Sequence[str]) -> int:
    """Run a subcommand or, under the plugin, a training script.

    Args:
        argv: its name and its arguments.

    Returns:
        The exit code, where the script itself does not exit.
    """
    if argv and not argv[0].startswith("-") and not os.path.isfile(argv[0]):
        from megatron_edit.tools.cli import SUBCOMMANDS
        from megatron_edit.tools.cli import main as command

        if argv[0] in SUBCOMMANDS:  # all but one are for a single process
            return command(argv) if launcher.is_first_rank() or argv[0] == DOCTOR else 0
    return launcher.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
