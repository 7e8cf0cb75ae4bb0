"""Run scripts/pretrain_gpt.py with bad data in some steps of one replica.

    CORRUPTION_PLAN={...} CORRUPTION_REPLICA=1 \
        python -m megatron_edit benchmarks/convergence_parts/pretrain_corrupted.py --num-layers 2

Only training batches are replaced, after they have been read, so that the consumed samples stay
the same. Evaluations read clean data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from frame.launch import load_script

from convergence_parts.corruption import LABELS, PLAN_VARIABLE, REPLICA_VARIABLE, Corruption


def main() -> None:
    """Wrap the batch reader of the training script, and run the script."""
    plan = Corruption.from_json(os.environ[PLAN_VARIABLE])
    script: Any = load_script()
    corrupt(script, plan, int(os.environ[REPLICA_VARIABLE]))
    script.main()


def corrupt(script: Any, plan: Corruption, replica: int) -> None:
    """Wrap `get_batch` of a training script, and `forward_step` to tell training from evaluation.

    Args:
        script: the script as a module, not yet run. *Mutates* it.
        plan: when data are corrupted.
        replica: number of this replica.
    """
    training = [False]

    def wrap_forward_step(forward_step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward_step)
        def recording_forward_step(data_iterator: Any, model: Any) -> Any:
            training[0] = bool(model.training)
            return forward_step(data_iterator, model)

        return recording_forward_step

    def wrap_get_batch(get_batch: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(get_batch)
        def corrupting_get_batch(*args: Any) -> Any:
            batch = get_batch(*args)
            megatron = script.get_args()
            step = megatron.curr_iteration + 1
            if training[0] and plan.is_corrupted(replica, step):
                batch = dict(batch) | make_bad_fields(batch, plan, step, megatron.vocab_size)
            return batch

        return corrupting_get_batch

    script.forward_step = wrap_forward_step(script.forward_step)
    script.get_batch = wrap_get_batch(script.get_batch)


def make_bad_fields(batch: Any, plan: Corruption, step: int, vocab_size: int) -> dict[str, Any]:
    """Return random tokens with their labels, or the labels alone, in the shape of the batch."""
    samples, length = batch["tokens"].shape
    random_tokens = plan.tokens(step, (samples, length + 1), vocab_size).to(batch["tokens"].device)
    labels = {"labels": random_tokens[:, 1:].contiguous()}
    return (
        labels if plan.kind == LABELS else labels | {"tokens": random_tokens[:, :-1].contiguous()}
    )


if __name__ == "__main__":
    main()
