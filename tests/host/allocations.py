"""Tracking of the memory that tensor operations allocate, whatever keeps the tensors alive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):  # type: ignore[misc]
    """Tracks the storages that operations in wrapped calls allocate until they are freed, on any
    thread.

    Attributes:
        peak: the largest number of bytes alive at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: list[tuple[StorageWeakRef, int]] = []
        self._wrapped = threading.local()  # as torch's dispatch modes are
        self._lock = threading.Lock()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        with self._lock:
            known = given | {ref.cdata for ref, _ in self._alive()}
            for storage in _storages(result):
                if storage._cdata not in known:
                    known.add(storage._cdata)
                    self._made.append((StorageWeakRef(storage), storage.nbytes()))
            self.peak = max(self.peak, self.live)
        return result

    @property
    def live(self) -> int:
        """Number of bytes that are alive now."""
        return sum(nbytes for _, nbytes in self._alive())

    def _alive(self) -> list[tuple[StorageWeakRef, int]]:
        self._made = [(ref, nbytes) for ref, nbytes in self._made if not ref.expired()]
        return self._made

    def wrap_call(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a call to track its allocations; a nested wrapped call counts to the outer one."""

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with self._outermost():
                return call(*args, **kwargs)

        return wrapped

    @contextmanager
    def _outermost(self) -> Iterator[None]:
        if getattr(self._wrapped, "is_on", False):
            yield
            return
        self._wrapped.is_on = True
        try:
            with self:
                yield
        finally:
            self._wrapped.is_on = False


def _storages(tree: Any) -> Iterable[torch.UntypedStorage]:
    return (t.untyped_storage() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))
