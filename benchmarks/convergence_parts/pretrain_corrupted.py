"""scripts/pretrain_gpt.py, fed with bad data in some steps of one replica.

    CORRUPTION_PLAN={...} CORRUPTION_REPLICA=1 \
        python -m megatron_edit benchmarks/convergence_parts/pretrain_corrupted.py --num-layers 2

Only batches that are trained on are replaced, after they have been read: the samples that are
consumed are the same. Evaluations see clean data.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from frame.launch import load_script

from convergence_parts.corruption import LABELS, PLAN_VARIABLE, REPLICA_VARIABLE, Corruption


def main() -> None:
    """Put the bad data between the script and its reader, and run it."""
    plan = Corruption.from_json(os.environ[PLAN_VARIABLE])
    script: Any = load_script()
    corrupt(script, plan, int(os.environ[REPLICA_VARIABLE]))
    script.main()


def corrupt(script: Any, plan: Corruption, replica: int) -> None:
    """Wrap a training script's `get_batch`, and its `forward_step` to know what it is called for.

    Args:
        script: the script as a module, not yet run. *Mutates* it.
        plan: when it strikes.
        replica: which one this is.
    """
    training = [False]

    def watched(forward_step: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward_step)
        def stepping(data_iterator: Any, model: Any) -> Any:
            training[0] = bool(model.training)
            return forward_step(data_iterator, model)

        return stepping

    def replaced(get_batch: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(get_batch)
        def reading(*args: Any) -> Any:
            batch = get_batch(*args)
            megatron = script.get_args()
            step = megatron.curr_iteration + 1
            if training[0] and plan.strikes(replica, step):
                batch = dict(batch) | bad(batch, plan, step, megatron.vocab_size)
            return batch

        return reading

    script.forward_step = watched(script.forward_step)
    script.get_batch = replaced(script.get_batch)


def bad(batch: Any, plan: Corruption, step: int, vocab_size: int) -> dict[str, Any]:
    """Random tokens and the labels that follow from them, or these alone; as large as a batch's."""
    samples, length = batch["tokens"].shape
    drawn = plan.tokens(step, (samples, length + 1), vocab_size).to(batch["tokens"].device)
    labels = {"labels": drawn[:, 1:].contiguous()}
    return labels if plan.kind == LABELS else labels | {"tokens": drawn[:, :-1].contiguous()}


if __name__ == "__main__":
    main()
