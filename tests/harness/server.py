"""A warm process that forks the ranks of a test: torch and Megatron are imported once, here.

Started as ``python -m tests.harness.server FD``, where FD is one end of a socket pair. It reads
a `Job` at a time and answers with a `Report`. When the other end closes, it kills what it
started and goes. The fork happens before any process group or thread exists.
"""

from __future__ import annotations

import argparse
import ctypes
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
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tests.harness.jobs import Job, Report, resolve
from tests.harness.ports import free_ports

_POLL_SECONDS = 0.01
_STORE_SECONDS = 5
_PR_SET_PDEATHSIG = 1
# What ranks import. Those of ours stand for the packages that they import in turn.
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
_NUM_PARSERS = 3  # that a rank makes
_FROM_ENVIRONMENT = {"local_rank": "LOCAL_RANK", "inprocess_active_world_size": "WORLD_SIZE"}


def main(fd: int) -> None:
    """Import, say so, and serve until the other end closes."""
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
    """What every run of a training script would do again: the imports, and more."""
    from megatron_edit.host.cpu import enable_cpu_backend
    from megatron_edit.host.muon import import_optimizers
    from megatron_edit.host.seams.patching import Patcher

    enable_cpu_backend(Patcher("Megatron-LM"))
    import_optimizers()
    for module in _WARM:
        importlib.import_module(module)
    _remember_help_texts()
    _make_parsers_ahead()
    _shorten_mock_data()
    _let_clients_wait_for_their_store()
    gc.collect()
    gc.freeze()  # or each rank's first collection would copy all of this


def _remember_help_texts() -> None:
    """Megatron parses the sources of its configurations anew whenever it makes its parser."""
    from megatron.training import arguments
    from megatron.training.argument_utils import ArgumentGroupFactory

    read = ArgumentGroupFactory._get_field_docstrings
    texts: dict[type, dict[str, str]] = {}

    def remembered(factory: Any, config: type) -> dict[str, str]:
        if config not in texts:
            texts[config] = read(factory, config)
        return dict(texts[config])

    ArgumentGroupFactory._get_field_docstrings = remembered
    arguments.add_megatron_arguments(_parser())


def _make_parsers_ahead() -> None:
    """A parser of a thousand flags is a third of what a rank computes before it trains. Each rank
    has those made here to itself, as it has all memory."""
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
        for dest, variable in _FROM_ENVIRONMENT.items():  # read when it was made, by the server
            parser.set_defaults(**{dest: int(os.environ[variable])})
        return parser

    arguments.add_megatron_arguments = take


def _is_plain(parser: argparse.ArgumentParser) -> bool:
    """Whether nobody has added anything to it, or made it in another way."""
    plain, values = vars(_parser()), vars(parser)
    names = ("formatter_class", "allow_abbrev", "prefix_chars", "add_help", "argument_default")
    is_same = values.keys() == plain.keys() and all(values[name] == plain[name] for name in names)
    return is_same and len(parser._actions) == len(plain["_actions"])


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(allow_abbrev=False)


def _shorten_mock_data() -> None:
    """An epoch of millions of samples is shuffled before the few that a test takes."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = _MOCK_DOCUMENTS


def _let_clients_wait_for_their_store() -> None:
    """Who knocks before the host listens sleeps for a second or so, and each rank with it."""
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
    """Whether a process of this machine listens on a port; it does not notice."""
    local, listening = f":{port:04X}", "0A"
    for table in ("/proc/net/tcp6", "/proc/net/tcp"):
        with open(table) as lines:
            fields = (line.split(maxsplit=4) for line in lines)
            if any(f[1].endswith(local) and f[3] == listening for f in fields):
                return True
    return False


def _run(job: Job, requests: Connection) -> Report:
    """Fork the ranks and wait for them, or for the end of their time."""
    (port,) = free_ports(1)
    others_done, still_running = os.pipe()
    pids = []
    for rank in range(job.world_size):
        pid = os.fork()
        if pid == 0:
            requests.close()
            os.close(still_running if rank == 0 else others_done)
            _be_rank(job, rank, port, others_done if rank == 0 else None)
        pids.append(pid)
    os.close(others_done)
    os.close(still_running)
    return _wait(job, pids, requests)


def _wait(job: Job, pids: list[int], requests: Connection) -> Report:
    """Collect exit codes. As under torchrun, one failed rank ends the others after a while; at
    once, where all that are left are frozen and will never end."""
    codes: dict[int, int] = {}
    frozen: set[int] = set()
    deadline = time.monotonic() + job.timeout
    failed = timed_out = False
    while len(codes) < len(pids):
        for pid in pids:
            status = _change_of(pid) if pid not in codes else None
            if status is None:
                continue
            if os.WIFSTOPPED(status):
                frozen.add(pid)
            elif os.WIFCONTINUED(status):
                frozen.discard(pid)
            else:
                codes[pid] = os.waitstatus_to_exitcode(status)
                _kill_group(pid)  # what it started and left behind
        if not failed and any(codes.values()):
            failed = True
            deadline = min(deadline, time.monotonic() + job.grace)
        client_gone = requests.poll(_POLL_SECONDS)
        is_hopeless = failed and frozen.union(codes) == set(pids)
        if client_gone or is_hopeless or time.monotonic() > deadline:
            timed_out = timed_out or not failed
            for pid in pids:
                if pid not in codes:
                    _kill_group(pid)
    return Report(tuple(codes[pid] for pid in pids), timed_out)


def _change_of(pid: int) -> int | None:
    """The status of a rank that has ended, stopped or gone on since the last call."""
    changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
    return status if changed else None


def _kill_group(leader: int) -> None:
    """Kill a rank and its descendants; each rank leads a process group of its own."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def _be_rank(job: Job, rank: int, port: int, others_done: int | None) -> NoReturn:
    """The life of a forked rank. Leaves by `os._exit`: the server's clean-up is not ours."""
    code = 1
    try:
        _settle(job, rank, port)
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
        # Rank 0 holds the store, which the others may need to the end.
        select.select([others_done], [], [], job.grace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _settle(job: Job, rank: int, port: int) -> None:
    """Give a fresh rank its process group, its output files and its environment."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(job.directory / f"rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, fd)
        os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
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
