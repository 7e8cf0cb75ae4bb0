"""Pretrain a GPT with stock Megatron on one rank, and torchft's DiLoCo across such replicas.

Model, flags and inner steps are those of a stock training of one rank. Replica r of N reads the
samples of rank r of a stock data-parallel training with N times the global batch. torchft hooks
into the inner optimizer as in its documentation: a manager per replica, a lighthouse on the first
one, gloo between them, per-tensor fp32 all-reduces (its default), and Nesterov SGD as the outer
optimizer (0.7, momentum 0.9). Started by a benchmark, through the launcher:

    REPLICA=0 NUM_REPLICAS=2 FIRST_ADDRESS=10.77.0.1 ... \
        python -m megatron_edit pretrain_torchft.py --torchft-sync-every 40 ... <Megatron's flags>
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from megatron.training import get_args, training
from torch.distributed import TCPStore
from torch.utils.data import Subset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import pretrain_gpt

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
# Longer than any sync on the links of a benchmark: a timeout would discard the round.
PATIENCE = timedelta(seconds=600)
REPLICA, NUM_REPLICAS = int(os.environ["REPLICA"]), int(os.environ["NUM_REPLICAS"])


def main() -> None:
    """Train with torchft."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name in ("sync-every", "fragments", "sync-delay"):
        parser.add_argument(f"--torchft-{name}", type=int, required=True)
    flags, sys.argv[1:] = parser.parse_known_args()
    name_host()
    set_up, build = training.setup_model_and_optimizer, pretrain_gpt.datasets_provider
    with ExitStack() as exit_stack:

        def set_up_with_torchft(*args: Any, **options: Any) -> Any:
            chunks, optimizer, scheduler = set_up(*args, **options)
            (model,) = unwrap_model(chunks)
            open_diloco(flags, model, inner_optimizer(optimizer), exit_stack)
            return chunks, optimizer, scheduler

        def build_own_datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> Any:
            of_all = [NUM_REPLICAS * number for number in num_samples]
            return [own_samples(each) for each in build(of_all, vp_stage)]

        training.setup_model_and_optimizer = set_up_with_torchft
        pretrain_gpt.datasets_provider = build_own_datasets
        pretrain_gpt.main()


def name_host() -> None:
    """Set the host name of this process to its address.

    torchft sends its peers the host name to connect to, and a lab has no name resolution.
    """
    os.unshare(os.CLONE_NEWUTS)
    socket.sethostname(os.environ["MASTER_ADDR"])


def own_samples(dataset: Any) -> Any:
    """Return the samples of this replica: its part of each global batch."""
    if dataset is None:
        return None
    batch = get_args().global_batch_size
    part = Subset(dataset, [number for number in range(len(dataset))
                            if number // batch % NUM_REPLICAS == REPLICA])  # fmt: skip
    part.split = dataset.index_split  # Megatron's loaders ask for it
    return part


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the single torch optimizer inside Megatron's."""
    (wrapper,) = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = wrapper.optimizer
    assert isinstance(inner, torch.optim.Optimizer), type(inner)
    return inner


def split_model(model: Any, num_fragments: int) -> list[torch.nn.Module]:
    """Split a GPTModel with tied embeddings into contiguous parts of about equal sizes.

    The largest part is as small as parts of embedding, attention, MLP and norms allow.
    """
    layers = [part for layer in model.decoder.layers for part in layer.children()]
    parts = [model.embedding, *layers, model.decoder.final_layernorm]
    parts = [part for part in parts if any(True for _ in part.parameters())]
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts]
    cuts = combinations(range(1, len(parts)), num_fragments - 1)
    ends = min(
        ([0, *inner, len(parts)] for inner in cuts),
        key=lambda ends: max(sum(sizes[a:b]) for a, b in pairwise(ends)),
    )
    fragments = [torch.nn.ModuleList(parts[a:b]) for a, b in pairwise(ends)]
    found = [id(p) for fragment in fragments for p in fragment.parameters()]
    if sorted(found) != sorted(id(p) for p in model.parameters()):
        raise SystemExit("pretrain_torchft: the fragments do not make up the model")
    return fragments


def open_diloco(
    flags: argparse.Namespace, model: Any, optimizer: torch.optim.Optimizer, exit_stack: ExitStack
) -> None:
    """Wrap a model and its inner optimizer with torchft, until the exit stack closes.

    *Collective* over the replicas.
    """
    # Imported late: torchft reads the host name on import.
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]
    from torchft.local_sgd import DiLoCo  # type: ignore[import-not-found]

    first, port = os.environ["FIRST_ADDRESS"], int(os.environ["MASTER_PORT"])
    store = TCPStore(first, port, is_master=False, timeout=PATIENCE)
    if REPLICA == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=NUM_REPLICAS)
        exit_stack.callback(lighthouse.shutdown)
        store.set("torchft/lighthouse", lighthouse.address())
    exit_stack.push(lambda failure, *_: wait_for_others(store) if failure is None else None)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=NUM_REPLICAS,
        use_async_quorum=False,  # required by DiLoCo
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
        lighthouse_addr=store.get("torchft/lighthouse").decode(),
        replica_id=f"replica{REPLICA}",
        hostname=os.environ["MASTER_ADDR"],
        init_sync=False,  # all start with the same parameters
        max_retries=0,  # a failed sync must fail the run
    )
    exit_stack.callback(manager.shutdown)
    fragments = split_model(model, flags.torchft_fragments)
    outer = [
        torch.optim.SGD(f.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
        for f in fragments
    ]
    diloco = DiLoCo(
        manager,
        fragments,
        optimizer,
        outer,
        sync_every=flags.torchft_sync_every,
        fragment_sync_delay=flags.torchft_sync_delay,
    )
    exit_stack.enter_context(diloco)
    sizes = [sum(p.numel() for p in f.parameters()) for f in fragments]
    print(f"torchft: parameters of the fragments: {sizes}", flush=True)
    exit_stack.callback(lambda: print(f"torchft: {manager.current_step()} syncs", flush=True))


def wait_for_others(store: TCPStore) -> None:
    """Keep the first replica, with its store and lighthouse, until the others are done."""
    if REPLICA:
        store.set(f"torchft/done/{REPLICA}", "")
    else:
        store.wait([f"torchft/done/{other}" for other in range(1, NUM_REPLICAS)], PATIENCE)


if __name__ == "__main__":
    main()
