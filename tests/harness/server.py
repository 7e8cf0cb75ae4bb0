"""A preloaded process that forks the ranks of a test, so that Megatron is imported only once.

Started as ``python -m tests.harness.server FD``, where FD is one end of a socket pair. It reads
one `Job` at a time and answers with a `Report`. When the other end closes, it kills the ranks and
exits. It forks before any process group or thread exists.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tests.harness.jobs import Job, Report, resolve
from tests.harness.ports import free_ports

_POLL_SECONDS = 0.01
_STORE_SECONDS = 5
_PR_SET_PDEATHSIG = 1
_STACKS_SIGNAL = signal.SIGRTMIN + 5  # a rank writes the stacks of its threads
_STACKS_SECONDS = 0.5
# Modules that ranks import, directly or indirectly.
_WARM = (
    "megatron.training.training",
    "megatron.training.argument_utils",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.helpers",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.utils.build_tokenizer",
    "megatron.core.tokenizers.text",
    "megatron.core.tokenizers.text.libraries",
    "megatron.core.tokenizers.text.models",
    "megatron_edit.launcher",
    "megatron_edit.host.attach",
    "megatron_edit.host.data",
    "megatron_edit.host.training",
)
_MOCK_DOCUMENTS = 2000
_NUM_PARSERS = 3  # that a rank creates
_FROM_ENVIRONMENT = {"local_rank": "LOCAL_RANK", "inprocess_active_world_size": "WORLD_SIZE"}


def main(fd: int) -> None:
    """Import the modules, send "ready", and serve until the other end closes."""
    requests = Connection(fd)
    _warm_up()
    requests.send("ready")
    while True:
        try:
            job = requests.recv()
        except EOFError:
            return
        requests.send(_run(job, requests))


def _warm_up() -> None:
    """Do in advance what every run of a training script would repeat, such as imports."""
    from megatron_edit.host.cpu import enable_cpu_backend
    from megatron_edit.host.muon import import_optimizers
    from megatron_edit.host.seams.patching import Patcher

    enable_cpu_backend(Patcher("Megatron-LM"))
    import_optimizers()
    for module in _WARM:
        importlib.import_module(module)
    _cache_help_texts()
    _cache_entry_points()
    _prebuild_parsers()
    _shorten_mock_data()
    _delay_store_clients()
    gc.collect()
    gc.freeze()  # else the first collection of each rank would copy all these pages


def _cache_help_texts() -> None:
    """Cache docstrings that Megatron parses from sources whenever it builds its parser."""
    from megatron.training import arguments
    from megatron.training.argument_utils import ArgumentGroupFactory

    read = ArgumentGroupFactory._get_field_docstrings
    texts: dict[type, dict[str, str]] = {}

    def cached(factory: Any, config: type) -> dict[str, str]:
        if config not in texts:
            texts[config] = read(factory, config)
        return dict(texts[config])

    ArgumentGroupFactory._get_field_docstrings = cached
    arguments.add_megatron_arguments(_parser())


def _cache_entry_points() -> None:
    """Cache the entry points of all packages, of which torch asks for those of backends."""
    metadata.entry_points = functools.cache(metadata.entry_points)  # type: ignore[assignment]
    metadata.entry_points(group="torch.distributed.backends")


def _prebuild_parsers() -> None:
    """Build argument parsers in advance: one takes a third of a rank's time before training. A
    forked rank has its own copies of them."""
    from megatron.training import arguments

    make: Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
    make = arguments.add_megatron_arguments
    made = [make(_parser()) for _ in range(_NUM_PARSERS)]

    @functools.wraps(make)
    def take(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        if not made or not _is_plain(parser):
            return make(parser)
        name, description = parser.prog, parser.description
        vars(parser).update(vars(made.pop()))
        parser.prog, parser.description = name, description
        for (
            dest,
            variable,
        ) in _FROM_ENVIRONMENT.items():  # the server read these when it built the parser
            parser.set_defaults(**{dest: int(os.environ[variable])})
        return parser

    arguments.add_megatron_arguments = take


def _is_plain(parser: argparse.ArgumentParser) -> bool:
    """Return whether a parser is unchanged and was created like `_parser()`."""
    plain, values = vars(_parser()), vars(parser)
    names = ("formatter_class", "allow_abbrev", "prefix_chars", "add_help", "argument_default")
    is_same = values.keys() == plain.keys() and all(values[name] == plain[name] for name in names)
    return is_same and len(parser._actions) == len(plain["_actions"])


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(allow_abbrev=False)


def _shorten_mock_data() -> None:
    """Shorten mock data, of which Megatron shuffles a complete epoch for each run."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = _MOCK_DOCUMENTS


def _delay_store_clients() -> None:
    """Delay store clients until the store listens: a refused connection costs about a second."""
    import torch.distributed as dist

    class PatientStore(dist.TCPStore):  # type: ignore[misc]
        def __init__(self, host_name: str, port: int, *args: Any, **kwargs: Any) -> None:
            is_master = kwargs.get("is_master", args[1] if len(args) > 1 else False)
            deadline = time.monotonic() + _STORE_SECONDS
            while not is_master and not _is_listened_on(port) and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
            super().__init__(host_name, port, *args, **kwargs)

    for module in ("torch.distributed", "torch.distributed.rendezvous"):
        importlib.import_module(module).TCPStore = PatientStore  # type: ignore[attr-defined]


def _is_listened_on(port: int) -> bool:
    """Return whether a local process listens on a port, without connecting to it."""
    local, listening = f":{port:04X}", "0A"
    for table in ("/proc/net/tcp6", "/proc/net/tcp"):
        with open(table) as lines:
            fields = (line.split(maxsplit=4) for line in lines)
            if any(f[1].endswith(local) and f[3] == listening for f in fields):
                return True
    return False


def _run(job: Job, requests: Connection) -> Report:
    """Fork the ranks and wait for their end, or for the time-out."""
    (port,) = free_ports(1)
    others_done, still_running = os.pipe()
    pids = []
    for rank in range(job.world_size):
        pid = os.fork()
        if pid == 0:
            requests.close()
            os.close(still_running if rank == 0 else others_done)
            _run_rank(job, rank, port, others_done if rank == 0 else None)
        pids.append(pid)
    os.close(others_done)
    os.close(still_running)
    return _wait(job, pids, requests)


def _wait(job: Job, pids: list[int], requests: Connection) -> Report:
    """Collect exit codes. As under torchrun, a failed rank ends the others after `grace`, or at
    once if all remaining ranks are stopped processes."""
    codes: dict[int, int] = {}
    frozen: set[int] = set()
    deadline = time.monotonic() + job.timeout
    failed = timed_out = False
    while len(codes) < len(pids):
        for pid in pids:
            status = _poll_status(pid) if pid not in codes else None
            if status is None:
                continue
            if os.WIFSTOPPED(status):
                frozen.add(pid)
            elif os.WIFCONTINUED(status):
                frozen.discard(pid)
            else:
                codes[pid] = os.waitstatus_to_exitcode(status)
                _kill_group(pid)  # and the processes that it has started
        if not failed and any(codes.values()):
            failed = True
            deadline = min(deadline, time.monotonic() + job.grace)
        client_gone = requests.poll(_POLL_SECONDS)
        is_hopeless = failed and frozen.union(codes) == set(pids)
        if client_gone or is_hopeless or time.monotonic() > deadline:
            timed_out = timed_out or not failed
            hanging = [pid for pid in pids if pid not in codes and pid not in frozen]
            for pid in hanging:
                os.kill(pid, _STACKS_SIGNAL)
            time.sleep(_STACKS_SECONDS if hanging else 0.0)
            for pid in pids:
                if pid not in codes:
                    _kill_group(pid)
    return Report(tuple(codes[pid] for pid in pids), timed_out)


def _poll_status(pid: int) -> int | None:
    """Return the wait status of a rank that has ended, stopped or continued since the last call."""
    changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
    return status if changed else None


def _kill_group(leader: int) -> None:
    """Kill a rank and its descendants; each rank leads a process group of its own."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _run_rank(job: Job, rank: int, port: int, others_done: int | None) -> NoReturn:
    """Run a job in a forked rank, and exit by `os._exit`, without the server's clean-up."""
    code = 1
    try:
        _set_up_rank(job, rank, port)
        value = resolve(job.target)(*job.args)
        (job.directory / f"rank{rank}.value").write_bytes(pickle.dumps(value))
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    if others_done is not None and code == 0:
        # Rank 0 hosts the store, which the others may need until they end.
        select.select([others_done], [], [], job.grace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _set_up_rank(job: Job, rank: int, port: int) -> None:
    """Set up process group, output files and environment of a forked rank."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(job.directory / f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, fd)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    # Not in stderr, which a launch with several replicas may redirect.
    stacks = os.open(job.directory / f"rank{rank}.stacks", os.O_WRONLY | os.O_CREAT)
    faulthandler.register(_STACKS_SIGNAL, file=stacks)
    os.chdir(job.cwd)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.world_size),
        LOCAL_WORLD_SIZE=str(job.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    for name, value in job.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


if __name__ == "__main__":
    main(int(sys.argv[1]))
