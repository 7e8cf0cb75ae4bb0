"""The hub's store as torch's groups use one, and groups that can be formed again with others.

Needs torch >= 2.14 (`ProcessGroup.reconfigure`, marked experimental there).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as native
import torch.distributed as dist

from megatron_edit.errors import ReplicaLostError, UsageError

LEAST_TORCH = "2.14"
SLICE_SECONDS = 0.2  # after which a wait that is given up ends
c10d: Any = native  # its types do not know what torch 2.14 adds


def check_torch() -> None:
    """Check that groups can be formed again with other ranks.

    Raises:
        UsageError: not with this torch.
    """
    if not hasattr(dist.ProcessGroupGloo._Options(), "enable_reconfigure"):
        raise UsageError(
            f"torch {torch.__version__}",
            f"elastic replicas need torch >= {LEAST_TORCH}",
            "install it, or run without --edit-hub",
        )


class HubStore(dist.Store):  # type: ignore[misc]
    """`torch.distributed.Store` over the hub.

    Args:
        client: an open `elastic.store.StoreClient`, or what has its methods.
        timeout: longest wait.
    """

    def __init__(self, client: Any, timeout: timedelta) -> None:
        super().__init__()
        self._client, self._timeout, self._is_given_up = client, timeout, False

    def give_up(self) -> None:
        """Let waits of other threads fail soon."""
        self._is_given_up = True

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._client.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it.

        Raises:
            RuntimeError: it was not set in time.
        """
        self.wait([key])
        return bytes(self._client.get(key) or b"")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set."""
        return bool(self._client.wait(keys, 0.0))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            RuntimeError: they were not in time, or it is given up.
        """
        seconds = (timeout or self._timeout).total_seconds()
        until = time.monotonic() + seconds
        while not self._client.wait(keys, min(max(until - time.monotonic(), 0.0), SLICE_SECONDS)):
            if self._is_given_up:
                raise RuntimeError("given up")
            if time.monotonic() >= until:
                raise RuntimeError(f"the hub's store has no {', '.join(keys)} after {seconds:g} s")

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value if it equals `expected`; return the value after that."""
        before, after = (
            each.encode() if isinstance(each, str) else bytes(each) for each in (expected, desired)
        )
        return bytes(self._client.compare_set(key, before, after))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait."""
        self._timeout = timeout

    @property
    def timeout(self) -> timedelta:
        """The longest wait."""
        return self._timeout

    def has_extended_api(self) -> bool:
        """No: torch then uses only the methods above."""
        return False


class EpochGroup:
    """A gloo process group whose ranks can change.

    Args:
        number: of this rank, different from that of all other processes in the run.
        address: of the interface to listen on.
        timeout: longest wait of forming the group, and of a collective without its own.
        interface: of the network, instead of `address`; empty for none.

    Attributes:
        process_group: torch's; usable after `form`.

    Raises:
        UsageError: this torch has no such groups.
    """

    def __init__(
        self,
        store: HubStore,
        number: int,
        address: str,
        timeout: timedelta,
        interface: str = "",
    ) -> None:
        check_torch()
        self._timeout = timeout
        self._store = store  # torch's group does not keep a store alive that is written in Python
        options = dist.ProcessGroupGloo._Options()
        options._timeout, options.enable_reconfigure = timeout, True
        place = {"interface": interface} if interface else {"hostname": address}
        options._devices = [dist.ProcessGroupGloo.create_device(**place)]
        self.process_group: Any = dist.ProcessGroupGloo(store, number, number + 1, options)

    @property
    def handle(self) -> str:
        """What the other ranks need to form a group with this one; each forming changes it."""
        return str(self.process_group.get_reconfigure_handle())

    def leave_behind(self) -> None:
        """Never use it again; a forming that is under way fails soon. Its destructor would wait for
        collectives that may never end: one reference is leaked."""
        self._store.give_up()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    def form(self, uuid: int, handles: Sequence[str]) -> None:
        """Form the group anew, with these ranks; what was on its way is lost.

        Collective: the ranks with these handles.
        Blocks: the host, until all of them have joined.

        Args:
            uuid: of this forming, the same on all ranks and never used before.
            handles: of all ranks, in the order of their numbers in the group.

        Raises:
            ReplicaLostError: some rank has not joined in time, or the store cannot be used.
        """
        options = c10d.ReconfigureOptions()
        options.uuid, options.handles, options.timeout = uuid, list(handles), self._timeout
        try:
            self.process_group.reconfigure(options).wait()
        except (RuntimeError, OSError) as error:
            raise ReplicaLostError(f"group {uuid}: not all ranks have joined: {error}") from error
