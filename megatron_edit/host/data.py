"""Gives each replica its share of the samples, and lets replica 0 write shared files first."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.errors import UsageError
from megatron_edit.host.files import CORPUS_ARGUMENTS, is_number, one_at_a_time
from megatron_edit.host.seams.megatron import ParallelState
from megatron_edit.host.seams.patching import Patcher


class DataParallelView:
    """`parallel_state` with the N*D data-parallel ranks of the whole job.

    Replaces the name `mpu` in Megatron's modules that distribute or count samples, or seed random
    number generators. Groups and everything else are those of the replica.

    Args:
        mpu: `megatron.core.parallel_state`.
        placement: gives the replica and the number of replicas.
    """

    def __init__(self, mpu: ParallelState, placement: Placement) -> None:
        self._mpu = mpu
        self._placement = placement

    def get_data_parallel_rank(self, *args: object, **kwargs: object) -> int:
        """Return r * D + rank: a replica's ranks are contiguous, as in stock Megatron."""
        size: int = self._mpu.get_data_parallel_world_size(*args, **kwargs)
        rank: int = self._mpu.get_data_parallel_rank(*args, **kwargs)
        return self._placement.replica * size + rank

    def get_data_parallel_world_size(self, *args: object, **kwargs: object) -> int:
        """Return N * D."""
        size: int = self._mpu.get_data_parallel_world_size(*args, **kwargs)
        return self._placement.num_replicas * size

    def __getattr__(self, name: str) -> object:
        return getattr(self._mpu, name)


def share_samples(patcher: Patcher, placement: Placement) -> None:
    """Replace `mpu` in Megatron's modules for samples and seeds by a view of N*D ranks."""
    import megatron.training.datasets.data_samplers as samplers
    import megatron.training.initialize as initialize
    import megatron.training.training as training

    for module in (samplers, initialize, training):
        patcher.replace(module, "mpu", DataParallelView(module.mpu, placement))


def gate_dataset_index(patcher: Patcher, world: ReplicaWorld) -> None:
    """Build the dataset index cache on replica 0 first: it is written in place without a lock."""
    import megatron.training.training as training

    def around[**P, R](build: Callable[P, R]) -> Callable[P, R]:
        calls = iter(range(sys.maxsize))

        def gated(*args: P.args, **kwargs: P.kwargs) -> R:
            event = f"datasets/{next(calls)}"  # once per virtual pipeline stage
            world.wait_for_first_replica(event)
            with _alone_in(_index_folder(), world):
                built = build(*args, **kwargs)
            world.announce(event)
            return built

        return gated

    patcher.wrap(training, "build_train_valid_test_datasets", around)


def compile_helpers_once(patcher: Patcher, world: ReplicaWorld | None = None) -> None:
    """Compile Megatron's dataset helper once, on replica 0 first, unless it is prebuilt.

    The wheel of megatron-core has a built helper but no Makefile; Megatron would run make
    nevertheless, fail and exit.
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
                world.wait_for_first_replica("helpers")
            if not is_prebuilt:
                with _own_python_first(), _alone_in(folder, world), _compiling(folder):
                    compile_helpers()
            if world is not None:
                world.announce("helpers")

        return gated

    patcher.wrap(utils, "compile_helpers", around)


@contextmanager
def _compiling(folder: Path) -> Iterator[None]:
    """Name cause and remedy where Megatron's compilation fails, which only exits."""
    try:
        yield
    except (SystemExit, OSError) as error:
        programs = ("make", os.environ.get("CXX", "g++"))
        missing = [name for name in programs if shutil.which(name) is None]
        if importlib.util.find_spec("pybind11") is None:
            missing.append("pybind11")
        cause = f"without {', '.join(missing)}" if missing else f"make -C {folder} shows why"
        raise UsageError(
            f"Megatron's C++ helper for data sets in {folder}",
            f"cannot be compiled on {socket.gethostname()} ({cause})",
            "install make, a C++ compiler and pybind11 there, or copy a compiled clone",
            is_local=True,
        ) from error


def _alone_in(folder: Path | None, world: ReplicaWorld | None) -> AbstractContextManager[None]:
    """Keep the replicas of an elastic run, of which none is the first, from writing to a folder at
    the same time. The other ranks of a replica wait for rank 0 in Megatron's own code."""
    is_writer = world is not None and world.is_alone and world.placement.rank == 0
    return one_at_a_time(folder) if is_writer and folder is not None else nullcontext()


def _index_folder() -> Path | None:
    """Return a folder for the lock of Megatron's indices of data sets, the same on all replicas
    whose indices are; None where it writes none."""
    from megatron.training import get_args

    args = get_args()
    if args.data_cache_path:
        return Path(args.data_cache_path)
    for name in CORPUS_ARGUMENTS:
        value = getattr(args, name, None) or ()
        prefixes = [value] if isinstance(value, str) else [x for x in value if not is_number(x)]
        if prefixes:
            return Path(prefixes[0]).parent / "cache"
    return None


@contextmanager
def _own_python_first() -> Iterator[None]:
    """Put this interpreter first in PATH, so that make finds it if its venv is not activated.

    A venv has no python3-config, whose suffix of modules make uses: the interpreter that the venv
    was made with has it.
    """
    path = os.environ.get("PATH", "")
    own = [Path(sys.executable).parent, Path(sys.base_prefix) / "bin"]
    os.environ["PATH"] = os.pathsep.join([*map(str, own), path])
    try:
        yield
    finally:
        os.environ["PATH"] = path
