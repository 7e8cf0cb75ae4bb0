"""Refuses arguments that Megatron accepts and with which it fails later, without a clear message.

Some of these failures come hours later, at the first evaluation or at the end of training.
"""

from __future__ import annotations

from argparse import Namespace

from megatron_edit.errors import UsageError
from megatron_edit.flags import flag_of

# Smallest values of Megatron's arguments; it divides by most of them.
_LEAST = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "micro_batch_size": 1, "global_batch_size": 1,
    "eval_micro_batch_size": 1, "eval_global_batch_size": 1, "eval_interval": 1, "eval_iters": 0,
    "log_interval": 1, "tensorboard_log_interval": 1, "seed": 1, "num_workers": 0,
}  # fmt: skip
_FULL, _SEVERAL, _NAMES = "full_validation", "multiple_validation_sets", "validation_set_names"


def check_values(args: Namespace) -> None:
    """Refuse values with which Megatron fails later. Called before its validation.

    Raises:
        UsageError: a value is missing or out of range, or contradicts another.
    """
    for name, least in _LEAST.items():
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise UsageError(
                f"{flag_of(name)} {value}", f"must be at least {least}", f"use {least} or more"
            )
    _require(args, "lr", "must be given", "RATE")
    if not getattr(args, "train_iters", 1) and not getattr(args, "train_samples", None):
        rule = "the length of training must be given, and above 0"
        raise UsageError("--train-iters, --train-samples", rule, "add --train-iters STEPS")
    if getattr(args, "phase_transition_iterations", None) and not args.train_samples:
        raise UsageError(
            f"--phase-transition-iterations {args.phase_transition_iterations}",
            "needs the length of training in samples",
            "give --train-samples instead of --train-iters",
        )
    heads, groups = getattr(args, "num_attention_heads", None), getattr(args, "num_query_groups", 1)
    if getattr(args, "group_query_attention", False) and heads and heads % groups:
        raise UsageError(
            f"--num-query-groups {groups}",
            f"must divide --num-attention-heads {heads}",
            "give a divisor of it",
        )
    experts, chosen = getattr(args, "num_experts", None), getattr(args, "moe_router_topk", 0)
    if experts and chosen > experts:
        raise UsageError(
            f"--moe-router-topk {chosen}",
            f"must be at most --num-experts {experts}",
            f"use {experts} or less",
        )


def _require(args: Namespace, name: str, rule: str, what: str) -> None:
    if getattr(args, name, 0) is None:
        raise UsageError(f"{flag_of(name)} (not given)", rule, f"add {flag_of(name)} {what}")


def check_evaluations(args: Namespace) -> None:
    """Refuse evaluations at which Megatron's own loop fails. Called after its validation.

    Raises:
        UsageError: it would.
    """
    _require(args, "eval_interval", "must be given, even without evaluations", "STEPS")
    is_full, has_several = (getattr(args, name, False) for name in (_FULL, _SEVERAL))
    if is_full != has_several:
        given, missing = (_FULL, _SEVERAL) if is_full else (_SEVERAL, _FULL)
        raise UsageError(
            flag_of(given),
            "Megatron fails in evaluations with only one of these two flags",
            f"add {flag_of(missing)} (also for a single set), or drop {flag_of(given)}",
        )
    if getattr(args, _NAMES, None) and not has_several:
        value = f"{flag_of(_NAMES)} {' '.join(args.validation_set_names)}"
        rule = f"has no meaning without {flag_of(_SEVERAL)}"
        raise UsageError(value, rule, f"add {flag_of(_SEVERAL)} {flag_of(_FULL)}, or drop it")
    if not is_full:
        return
    if args.pipeline_model_parallel_size > 2 or args.virtual_pipeline_model_parallel_size:
        raise UsageError(
            f"{flag_of(_FULL)} with more than two pipeline stages",
            "Megatron does not tell the stages in the middle how long an evaluation is",
            f"drop {flag_of(_FULL)} and {flag_of(_SEVERAL)}",
        )
    if getattr(args, "sft", False):
        raise UsageError(
            f"{flag_of(_FULL)} with --sft",
            "a rank without a sample would count as a loss of 0",
            f"drop {flag_of(_FULL)} and {flag_of(_SEVERAL)}",
        )
