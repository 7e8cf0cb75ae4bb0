"""``python -m megatron_edit SCRIPT ...``: see `megatron_edit.launcher`.

If SCRIPT is no file but the name of a `megatron-edit` subcommand, that subcommand runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_edit import launcher

DOCTOR = "doctor"  # the only subcommand that runs on all ranks of a launch


def main(argv: Sequence[str]) -> int:
    """Run a subcommand, or a training script under the plugin.

    Args:
        argv: name of the subcommand or script, and its arguments.

    Returns:
        The exit code, unless the script itself exits.
    """
    if argv and not argv[0].startswith("-") and not os.path.isfile(argv[0]):
        from megatron_edit.tools.cli import SUBCOMMANDS
        from megatron_edit.tools.cli import main as command

        if argv[0] in SUBCOMMANDS:  # the others run in a single process
            return command(argv) if launcher.is_first_rank() or argv[0] == DOCTOR else 0
    return launcher.main(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
