"""Implements the line that `megatron-edit patch` adds to a training script.

The line runs the script again through the launcher, as ``-m megatron_edit`` would, and ends the
process with its exit code. It does nothing, and does not import torch, if the command line has no
flags of this package, if the launcher has started the script already, or if the script is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_edit.flags import RESERVED_PREFIXES
from megatron_edit.launched import is_launched


def activate(module: str, file: str) -> None:
    """Train with EDiT and exit, if the command line has flags of this package.

    Args:
        module: ``__name__`` of the training script.
        file: ``__file__`` of the training script.

    Raises:
        SystemExit: training has ended; only if there are such flags.
    """
    if module != "__main__" or is_launched() or not has_edit_flags(sys.argv[1:]):
        return
    from megatron_edit import launcher

    sys.exit(launcher.main([file, *sys.argv[1:]]))


def has_edit_flags(words: Sequence[str]) -> bool:
    """Whether a command line has a flag of this package, which stock Megatron would refuse."""
    return any(word.startswith(RESERVED_PREFIXES) for word in words)
