"""The launches of a training, one per replica: which there are, and which have ended.

Two launches with the same `--edit-replica-id`, or with different numbers of replicas, all end
before training begins: which of them is wrong cannot be determined, and the other launches would
wait a long time for the missing replica. A launch that starts when no replica is missing any more
ends alone: it is one too many, or belongs to another job with the same port.

A launch that fails leaves a note in the store, which every rank reads that waits for another
launch. One that is killed leaves none: the first rank of each launch keeps a connection to that of
replica 0, which notices its end, however it ended, and leaves the note for it. A heartbeat would
not do: before training, code in C++ may keep every thread of a process waiting for minutes.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from megatron_edit.comm.first_contact import ATTEMPT_SECONDS
from megatron_edit.comm.placement import Placement
from megatron_edit.constants import KEEPALIVE
from megatron_edit.errors import ReplicaLostError, UsageError, outcome_of
from megatron_edit.flags import flag

_STATE, _BEGUN = "start", "begun"
_NOTE, _NUMBER, _WATCH = "ended", "replicas", "watch"
_LOOK = "look at its last output"
_STAY_SECONDS = 4.0  # for which the host of the store stays until the other ranks have checked


def launch_key(replica: int) -> str:
    """Key in the shared store of the launch that has this replica id."""
    return f"launch/{replica}"


class LaunchRegistry:
    """Registry of the launches by replica id, which decides whether training may begin.

    One key of the store holds either that training has begun or why it is refused; the first rank
    that sets it decides for all, so that all ranks act alike.

    Args:
        shared: the store that all launches share, over a connection that no wait blocks.
    """

    def __init__(self, shared: dist.Store, own: dist.Store, placement: Placement) -> None:
        self._shared, self._own, self._place = shared, own, placement
        self._connection: socket.socket | None = None
        self._has_begun = False

    def register(self, timeout: timedelta) -> None:
        """Claim this launch's replica id. Blocks: until rank 0 of the launch has claimed it.

        Args:
            timeout: longest wait for rank 0.

        Raises:
            UsageError: another launch has the id, or all are refused; on all ranks of this launch.
        """
        key = "edit/registered"
        if self._place.rank == 0:
            self._own.set(key, self._refusal())
        self._own.wait([key], timeout)
        self._raise(self._own.get(key).decode())

    def check(self) -> None:
        """Check that the launches are not refused, and that none has ended.

        Raises:
            UsageError: they are, or one has ended with exit code 2.
            ReplicaLostError: one has ended otherwise, or the store is gone.
        """
        try:
            self._check()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            lost = ReplicaLostError(f"the store of replica 0 is gone ({reason}); {_LOOK}")
            lost.lost = [0]
            raise lost from error

    def _check(self) -> None:
        if self._shared.check([_NOTE]):
            replica, code, reason = json.loads(self._shared.get(_NOTE))
            host = self._shared.get(launch_key(replica)).decode().partition(" ")[0]
            if code == UsageError.exit_code:
                value, rule, remedy = reason
                raise UsageError(f"replica {replica} on {host}: {value}", rule, remedy)
            error = ReplicaLostError(f"replica {replica} on {host} has ended: {reason}; {_LOOK}")
            error.lost = [replica]
            raise error
        if not self._has_begun and self._shared.check([_STATE]):
            self._raise(self._shared.get(_STATE).decode())

    def begin(self, shared: dist.Store) -> None:
        """Record that all replicas have joined: training begins and cannot be refused any more.

        Args:
            shared: the same store over the connection that this process has anyway: one for each
                rank is enough in training.

        Raises:
            UsageError: a launch has refused it before; then on every rank.
        """
        self._raise(self._shared.compare_set(_STATE, "", _BEGUN).decode())
        self._has_begun, self._shared = True, shared

    def end(self, error: BaseException | None) -> None:
        """Tell the other launches how this process ends.

        Blocks: some seconds if it fails, as it may host the store, or the store does not answer.

        Args:
            error: that ends it; None if there is none.
        """
        code, reason = outcome_of(error)
        if not code:
            with suppress(OSError):  # replica 0 may be gone
                if self._connection is not None:
                    self._connection.sendall(b"1")
            return
        parts = None
        if isinstance(error, UsageError):
            parts = [error.value, error.rule, error.remedy]
        # A store whose process is stopped would never answer.
        self._start(self._note, self._place.replica, code, parts or reason).join(_STAY_SECONDS)
        if self._place.replica == 0:
            time.sleep(_STAY_SECONDS)

    def watch_launches(self) -> None:
        """Let replica 0 notice the end of the others. Only on the first rank of replica 0."""
        has_both = socket.has_dualstack_ipv6()
        family, host = (socket.AF_INET6, "::") if has_both else (socket.AF_INET, "")
        server = socket.create_server((host, 0), family=family, dualstack_ipv6=has_both)
        token = secrets.token_hex(8)
        self._start(self._accept, server, token)
        # One launch too many, with this id, must not take the place of another.
        self._shared.compare_set(_WATCH, "", f"{server.getsockname()[1]} {token}")

    def be_watched(self, host: str) -> None:
        """Connect to the first rank of replica 0, which notices the end of this process.

        Without a way there only a failure that this launch reports is noticed.

        Args:
            host: of replica 0.
        """
        port, token = self._shared.get(_WATCH).decode().split()
        with suppress(OSError):
            self._connection = socket.create_connection((host, int(port)), ATTEMPT_SECONDS)
            self._connection.sendall(f"{token} {self._place.replica}\n".encode())

    def _start(self, target: Callable[..., None], *args: object) -> threading.Thread:
        thread = threading.Thread(target=target, args=args, name="edit-launches", daemon=True)
        thread.start()
        return thread

    def _accept(self, server: socket.socket, token: str) -> None:
        while True:
            connection, _ = server.accept()
            self._start(self._attend, connection, token)

    def _attend(self, connection: socket.socket, token: str) -> None:
        """Wait until the other side ends, and leave a note if it did not say so."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            with suppress(AttributeError, OSError):  # not on all systems
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with connection, suppress(ValueError):
            with suppress(OSError):
                stream = connection.makefile("rb")
                words = stream.readline(64).decode().split()
                if words[:1] != [token]:
                    return
                replica = int(words[1])
                if stream.read(1):
                    return
            self._note(replica, ReplicaLostError.exit_code, "it was killed, or its machine is lost")

    def _note(self, replica: int, code: int, reason: object) -> None:
        with suppress(RuntimeError):  # the store may be gone
            self._shared.compare_set(_NOTE, "", json.dumps([replica, code, reason]))

    def _refusal(self) -> str:
        """Claim the id; return an empty string on success, else the error as JSON."""
        replica, host = self._place.replica, socket.gethostname()
        if (found := self._other_number(host)) is not None:
            return found
        mine = f"{host} {uuid.uuid4().hex}"
        holder = self._shared.compare_set(launch_key(replica), "", mine).decode()
        if holder == mine:
            return ""
        value = f"{flag('replica_id')} {replica}"
        remedy = f"give each launch an id of its own, 0 to {self._place.num_replicas - 1}"
        theirs = holder.partition(" ")[0]
        perhaps = "an earlier attempt of this replica, or another job on this port, counts as one"
        rule = f"two launches have it, on {theirs} and on {host} ({perhaps})"
        refusal = json.dumps([value, rule, remedy])
        keys = [launch_key(each) for each in range(self._place.num_replicas)]
        if self._shared.check(keys):
            state = "has it, and no replica is missing"
        elif self._shared.compare_set(_STATE, "", refusal).decode() == _BEGUN:
            state = "has it, and trains already"
        else:
            return refusal
        return json.dumps([value, f"a launch on {theirs} {state} ({perhaps})", remedy])

    def _other_number(self, host: str) -> str | None:
        """Return the error as JSON if the first launch has another number of replicas."""
        place = self._place
        mine = f"{place.num_replicas} replica {place.replica} on {host}"
        number, _, who = self._shared.compare_set(_NUMBER, "", mine).decode().partition(" ")
        if number == str(place.num_replicas):
            return None
        value = f"{flag('num_replicas')} {place.num_replicas} on replica {place.replica} on {host}"
        rule = f"must be as on {who}, which has {number}"
        refusal = json.dumps([value, rule, "start all replicas with the same flags"])
        if not self._shared.check([launch_key(each) for each in range(int(number))]):
            self._shared.compare_set(_STATE, "", refusal)  # else that job goes on without this one
        return refusal

    def _raise(self, state: str) -> None:
        if state in ("", _BEGUN):
            return
        if self._place.global_rank == 0:
            time.sleep(_STAY_SECONDS)
        raise UsageError(*json.loads(state))
