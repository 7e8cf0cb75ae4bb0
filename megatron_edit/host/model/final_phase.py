"""Computes where the final synchronous phase begins, in Megatron's iterations."""

from __future__ import annotations

from argparse import Namespace

from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    update_num_microbatches,
)

from megatron_edit.method.schedule import last_local


def last_local_iteration(args: Namespace, final_fraction: float) -> int:
    """Return the last iteration with a local step; without a final phase, the last of training.

    The fraction is of iterations, or with `--train-samples` of samples, like that of
    `--lr-warmup-fraction`. An iteration is local if fewer samples than the local ones were
    consumed before it.

    Args:
        args: Megatron's arguments, with `train_iters` set.
        final_fraction: fraction of training in the final phase; in [0, 1].
    """
    if not args.train_samples or not final_fraction:
        return last_local(int(args.train_iters), final_fraction)
    samples = last_local(int(args.train_samples), final_fraction)
    if not _has_changing_batch(args):
        return min(int(args.train_iters), -(-samples // int(args.global_batch_size)))
    consumed, iteration = 0, 0
    while consumed < samples and iteration < args.train_iters:
        update_num_microbatches(consumed, consistency_check=False)
        consumed += get_current_global_batch_size()
        iteration += 1
    update_num_microbatches(int(args.consumed_train_samples), consistency_check=False)
    return iteration


def _has_changing_batch(args: Namespace) -> bool:
    names = ("rampup_batch_size", "step_batch_size_schedule")
    return any(getattr(args, name, None) for name in names)
