"""A preloaded process that forks ranks of replicas on request, and reports how they end.

Started as ``python -m tests.harness.replica_server``. It reads one JSON object a line: `argv`,
`env` and `log` of a rank, answers with its process id, and prints a line for each rank that ends.
When its input ends, it kills all ranks and exits. Unlike `server`, ranks come and go.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import Any, NoReturn

from tests.harness.launch import REPOSITORY
from tests.harness.ranks import train_main
from tests.harness.server import _warm_up

_POLL_SECONDS = 0.02


def main() -> None:
    """Import the modules, print "ready", and serve."""
    _warm_up()
    _tell({"ready": True})
    pids: set[int] = set()
    rest = b""
    while True:
        _report_ended(pids)
        if not select.select([0], [], [], _POLL_SECONDS)[0]:
            continue
        chunk = os.read(0, 1 << 16)
        if not chunk:
            break
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            pid = _start(json.loads(line))
            pids.add(pid)
            _tell({"started": pid})
    for pid in pids:
        os.killpg(pid, signal.SIGKILL)


def _tell(what: dict[str, Any]) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def _report_ended(pids: set[int]) -> None:
    for pid in list(pids):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            pids.discard(pid)
            _tell({"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _start(wanted: dict[str, Any]) -> int:
    pid = os.fork()
    if pid == 0:
        _run(wanted)
    return pid


def _run(wanted: dict[str, Any]) -> NoReturn:
    os.setpgid(0, 0)
    log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.chdir(wanted["cwd"])
    os.environ.update(wanted["env"])
    code = 1
    try:
        train_main(str(REPOSITORY / "scripts/pretrain_gpt.py"), wanted["argv"], wanted["before"])
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
