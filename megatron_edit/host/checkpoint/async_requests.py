"""Merging several asynchronous saves into one.

Megatron's writer process takes one request at a time, and scheduling a request waits until the
process has taken it: the second of two would wait until the first is written to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_edit.host.seams.megatron import AsyncRequest as Request

_Call = tuple[Callable[..., None], list[object], Mapping[str, object]]
_BUCKETS = 1  # index of the data to be written among a writer's arguments


def merge_async_requests(requests: Sequence[Request]) -> list[Request]:
    """Return the same saves in as few requests as possible, in their order.

    All tensors are copied to the host in one go; then they are written, and completed, one request
    after another. Requests of NVIDIA's resiliency extension are not merged: its writers keep state
    beyond their arguments.

    Args:
        requests: not scheduled yet, with all their finalize functions.
    """
    if len(requests) < 2 or any(type(request) is not AsyncRequest for request in requests):
        return list(requests)
    finalize = [function for request in requests for function in request.finalize_fns]
    writing = [request for request in requests if request.async_fn is not None]
    if not writing:
        return [requests[-1]._replace(finalize_fns=finalize)]
    calls = [
        (write, _arguments_of(each), each.async_fn_kwargs)
        for each in writing
        if (write := each.async_fn) is not None
    ]
    return [
        AsyncRequest(
            async_fn=partial(_write, calls),
            async_fn_args=("", None),
            finalize_fns=finalize,
            preload_fn=partial(_fetch, [_fetcher(each) for each in writing]),
        )
    ]


def _arguments_of(request: Request) -> list[object]:
    """Return its arguments without the data that its preload function returns."""
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[_BUCKETS] = None
    return arguments


def _fetcher(request: Request) -> Callable[[], object]:
    return request.preload_fn or partial(request.async_fn_args.__getitem__, _BUCKETS)


def _fetch(fetchers: list[Callable[[], object]]) -> list[object]:
    """In the writer process: copy the tensors of all requests to the host."""
    return [fetch() for fetch in fetchers]


def _write(calls: list[_Call], _: str, fetched: list[object]) -> None:
    """In the writer process: write each request's data in turn."""
    for (write, arguments, named), buckets in zip(calls, fetched, strict=True):
        arguments[_BUCKETS] = buckets
        write(*arguments, **named)
