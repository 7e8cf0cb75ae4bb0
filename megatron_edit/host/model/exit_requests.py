"""Reads Megatron's exit signal and time limit, also while a replica waits at a meeting."""

from __future__ import annotations

import time
from argparse import Namespace


def is_end_requested(args: Namespace) -> bool:
    """Whether this process received the exit signal, or its time limit has passed.

    Megatron checks the same at each step boundary, but with collectives, which a waiting replica
    cannot use.

    Args:
        args: Megatron's arguments.
    """
    return exit_reason(args) is not None


def exit_reason(args: Namespace) -> str | None:
    """Return why this process should exit early; None if it should not.

    Args:
        args: Megatron's arguments.
    """
    import megatron.training.training as training

    # The handler's only public query is a collective.
    handler = training.get_signal_handler() if args.exit_signal_handler else None
    if getattr(handler, "_signal_received", False):
        return "a signal"
    limit = args.exit_duration_in_mins
    if limit and (time.time() - training._TRAIN_START_TIME) / 60 > limit:
        return f"--exit-duration-in-mins {limit}"
    return None
