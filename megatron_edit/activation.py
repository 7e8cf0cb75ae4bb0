"""What the line does that `megatron-edit patch` puts into a training script.

It starts the script once more, as ``-m megatron_edit`` would, and ends the process with its exit
code: a patched script and the launcher are one and the same way to train. Where the script was not
started with flags of ours, was started by the launcher, or is imported, nothing happens; not even
torch is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megatron_edit.flags import BEGINNINGS_TO_REFUSE
from megatron_edit.launched import is_launched


def activate(module: str, file: str) -> None:
    """Train with EDiT, if the command line says so, and exit.

    Args:
        module: ``__name__`` of the training script.
        file: ``__file__`` of the training script.

    Raises:
        SystemExit: the training is over; only where there are flags of ours.
    """
    if module != "__main__" or not is_asked_for(sys.argv[1:]):
        return
    if is_launched():
        return
    from megatron_edit import launcher

    sys.exit(launcher.main([file, *sys.argv[1:]]))


def is_asked_for(words: Sequence[str]) -> bool:
    """Whether a command line holds a flag of ours; stock Megatron would refuse any of them."""
    return any(word.startswith(BEGINNINGS_TO_REFUSE) for word in words)
