"""Pretrain a GPT with stock Megatron on one rank, and torchft's DiLoCo across such replicas.

The model, its flags and the inner steps equal those of the `ideal` kind of benchmarks/overlap.py.
torchft hooks into the inner optimizer as in its documentation: a manager per replica, a lighthouse
on the first one, gloo between them, per-tensor fp32 all-reduces (its default), and Nesterov SGD as
the outer optimizer (0.7, momentum 0.9). Started by the benchmark, through the launcher:

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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from megatron.training import get_args, training
from torch.distributed import TCPStore

from overlap_parts.kinds import split_evenly

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import pretrain_gpt

OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
# Longer than any sync on the links of the benchmark: a timeout would discard the round.
PATIENCE = timedelta(seconds=600)


@dataclass(frozen=True)
class Place:
    """The number of this replica, and the address of the first one's store."""

    replica: int
    num_replicas: int
    address: str
    first_address: str
    port: int

    @classmethod
    def from_environment(cls) -> Place:
        """Read the environment variables set by the benchmark."""
        env = os.environ
        return cls(
            replica=int(env["REPLICA"]),
            num_replicas=int(env["NUM_REPLICAS"]),
            address=env["MASTER_ADDR"],
            first_address=env["FIRST_ADDRESS"],
            port=int(env["MASTER_PORT"]),
        )


def name_host(address: str) -> None:
    """Set the host name of this process to its address.

    torchft sends its peers the host name to connect to, and the lab has no name resolution.
    """
    os.unshare(os.CLONE_NEWUTS)
    socket.sethostname(address)


def read_flags(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse the torchft flags; the rest are Megatron's."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for name in ("sync-every", "fragments", "sync-delay"):
        parser.add_argument(f"--torchft-{name}", type=int, required=True)
    return parser.parse_known_args(argv)


def split_model(model: Any, num_fragments: int) -> list[torch.nn.Module]:
    """Split the model into contiguous parts with about equal numbers of parameters.

    Args:
        model: a GPTModel with tied embeddings.
        num_fragments: 1 returns the model itself.
    """
    if num_fragments == 1:
        return [model]
    layers = list(model.decoder.layers)
    units = [[model.embedding], *([layer] for layer in layers)]
    units[-1].append(model.decoder.final_layernorm)
    sizes = [sum(p.numel() for part in unit for p in part.parameters()) for unit in units]
    fragments: list[torch.nn.Module] = [
        torch.nn.ModuleList([part for unit in units[cut.start : cut.stop] for part in unit])
        for cut in split_evenly(sizes, num_fragments)
    ]
    found = [id(p) for fragment in fragments for p in fragment.parameters()]
    if sorted(found) != sorted(id(p) for p in model.parameters()):
        raise SystemExit("pretrain_torchft: the fragments do not make up the model")
    return fragments


def open_diloco(
    place: Place, flags: argparse.Namespace, model: Any, optimizer: Any, exit_stack: ExitStack
) -> None:
    """Wrap a model and its inner optimizer with torchft, until the exit stack closes.

    *Collective* over the replicas.
    """
    # Imported late: torchft reads the host name on import.
    from torchft import Manager, ProcessGroupGloo
    from torchft.coordination import LighthouseServer
    from torchft.local_sgd import DiLoCo

    store = TCPStore(place.first_address, place.port, is_master=False, timeout=PATIENCE)
    if place.replica == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=place.num_replicas)
        exit_stack.callback(lighthouse.shutdown)
        store.set("rival/lighthouse", lighthouse.address())

    def wait_on_success(failure: type[BaseException] | None, *_: object) -> None:
        if failure is None:
            _wait_for_others(place, store)

    exit_stack.push(wait_on_success)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=place.num_replicas,
        use_async_quorum=False,  # required by DiLoCo
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
        connect_timeout=PATIENCE,
        lighthouse_addr=store.get("rival/lighthouse").decode(),
        replica_id=f"replica{place.replica}",
        hostname=place.address,
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


def _wait_for_others(place: Place, store: TCPStore) -> None:
    """Keep the first replica, with its store and lighthouse, until the others are done."""
    if place.replica:
        store.set(f"rival/done/{place.replica}", "")
    else:
        others = range(1, place.num_replicas)
        store.wait([f"rival/done/{replica}" for replica in others], PATIENCE)


def inner_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """Return the single torch optimizer inside Megatron's."""
    (wrapper,) = getattr(optimizer, "chained_optimizers", [optimizer])
    inner = wrapper.optimizer
    assert isinstance(inner, torch.optim.Optimizer), type(inner)
    return inner


def main() -> None:
    """Train with torchft."""
    flags, rest = read_flags(sys.argv[1:])
    sys.argv[1:] = rest
    place = Place.from_environment()
    name_host(place.address)
    set_up = training.setup_model_and_optimizer
    with ExitStack() as exit_stack:

        def set_up_with_torchft(*args: Any, **options: Any) -> Any:
            chunks, optimizer, scheduler = set_up(*args, **options)
            (model,) = unwrap_model(chunks)
            open_diloco(place, flags, model, inner_optimizer(optimizer), exit_stack)
            # From here on the seed only affects the data: each replica reads its own samples.
            get_args().seed += place.replica
            return chunks, optimizer, scheduler

        training.setup_model_and_optimizer = set_up_with_torchft
        pretrain_gpt.main()


if __name__ == "__main__":
    main()
