"""What Megatron knows of an end from outside, for a replica that waits."""

from __future__ import annotations

import time
from argparse import Namespace


def is_end_asked(args: Namespace) -> bool:
    """Whether this process got the signal to end, or its time is over: what Megatron asks at each
    step boundary, without its collectives. For a replica that waits, and makes no step.

    Args:
        args: Megatron's.
    """
    return reason_of_end(args) is not None


def reason_of_end(args: Namespace) -> str | None:
    """Why this process is to end early, in words; None where it is not.

    Args:
        args: Megatron's.
    """
    import megatron.training.training as training

    # Its only public question to the handler is a collective.
    handler = training.get_signal_handler() if args.exit_signal_handler else None
    if getattr(handler, "_signal_received", False):
        return "a signal"
    limit = args.exit_duration_in_mins
    if limit and (time.time() - training._TRAIN_START_TIME) / 60 > limit:
        return f"--exit-duration-in-mins {limit}"
    return None
