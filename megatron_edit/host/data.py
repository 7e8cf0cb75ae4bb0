"""Data: every replica reads its own share, and shared files are written by one replica first."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.host.seams.megatron import ParallelState
from megatron_edit.host.seams.patching import Patcher


class DataParallelView:
    """`parallel_state` as it would be on the N*D data-parallel ranks of the whole job.

    It stands in for the name `mpu` in the host modules that share samples out, count them or
    seed random streams. Groups, and everything else, are those of the replica.

    Args:
        mpu: the host's `megatron.core.parallel_state`.
        placement: gives the replica and the number of replicas.
    """

    def __init__(self, mpu: ParallelState, placement: Placement) -> None:
        self._mpu = mpu
        self._placement = placement

    def get_data_parallel_rank(self, *args: object, **kwargs: object) -> int:
        """r * D + rank: the replica's ranks are contiguous, as stock Megatron would number them."""
        size = self._mpu.get_data_parallel_world_size(*args, **kwargs)
        rank = self._mpu.get_data_parallel_rank(*args, **kwargs)
        return self._placement.replica * size + rank

    def get_data_parallel_world_size(self, *args: object, **kwargs: object) -> int:
        """N * D."""
        size = self._mpu.get_data_parallel_world_size(*args, **kwargs)
        return self._placement.num_replicas * size

    def __getattr__(self, name: str) -> object:
        return getattr(self._mpu, name)


def share_samples(patcher: Patcher, placement: Placement) -> None:
    """Give samplers, counters and seeds the view of N*D ranks."""
    import megatron.training.datasets.data_samplers as samplers
    import megatron.training.initialize as initialize
    import megatron.training.training as training

    for module in (samplers, initialize, training):
        patcher.replace(module, "mpu", DataParallelView(module.mpu, placement))


def gate_dataset_index(patcher: Patcher, world: ReplicaWorld) -> None:
    """Build the dataset index cache on replica 0 first: its writes are in place and unlocked."""
    import megatron.training.training as training

    def around[**P, R](build: Callable[P, R]) -> Callable[P, R]:
        calls = iter(range(sys.maxsize))

        def gated(*args: P.args, **kwargs: P.kwargs) -> R:
            event = f"datasets/{next(calls)}"  # once per virtual pipeline stage
            world.after_first_replica(event)
            built = build(*args, **kwargs)
            world.announce(event)
            return built

        return gated

    patcher.wrap(training, "build_train_valid_test_datasets", around)


def compile_helpers_once(patcher: Patcher, world: ReplicaWorld | None = None) -> None:
    """Compile the host's dataset helper once, and not at all where it cannot be compiled.

    The wheel of megatron-core brings the helper built but no Makefile; the host would run make
    all the same, fail and exit.
    """
    import megatron.core.datasets.utils as utils

    folder = Path(utils.__file__).parent
    is_prebuilt = (
        not (folder / "Makefile").exists()
        and importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
    )

    def around(compile_helpers: Callable[[], None]) -> Callable[[], None]:
        def gated() -> None:
            if world is not None:
                world.after_first_replica("helpers")
            if not is_prebuilt:
                with _own_python_first():
                    compile_helpers()
            if world is not None:
                world.announce("helpers")

        return gated

    patcher.wrap(utils, "compile_helpers", around)


@contextmanager
def _own_python_first() -> Iterator[None]:
    """Let make find this interpreter as `python3`, also where its environment is not activated."""
    path = os.environ.get("PATH", "")
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), path])
    try:
        yield
    finally:
        os.environ["PATH"] = path
