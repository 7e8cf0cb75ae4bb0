"""Several asynchronous saves as one.

Megatron's process that writes takes one request after another, and to hand one over is to wait
until that process has taken it: the second of two would wait until the first is on the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_edit.host.seams.megatron import AsyncRequest as Request

_Call = tuple[Callable[..., None], list[object], Mapping[str, object]]
_BUCKETS = 1  # place of what is to be written among a writer's arguments


def merge_async_requests(requests: Sequence[Request]) -> list[Request]:
    """The same saves in as few requests as possible, in their order.

    What is handed over is copied to the host in one go; then it is written, and completed, one
    after another. Requests of NVIDIA's resiliency extension are left as they are: its writers keep
    more than their arguments tell.

    Args:
        requests: not handed over yet, with all that is to be called when they are done.
    """
    if len(requests) < 2 or any(type(request) is not AsyncRequest for request in requests):
        return list(requests)
    finalize = [function for request in requests for function in request.finalize_fns]
    writing = [request for request in requests if request.async_fn is not None]
    if not writing:
        return [requests[-1]._replace(finalize_fns=finalize)]
    calls = [
        (write, _without(each), each.async_fn_kwargs)
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


def _without(request: Request) -> list[object]:
    """Its arguments, but for what its own fetching brings: that need not be sent twice."""
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[_BUCKETS] = None
    return arguments


def _fetcher(request: Request) -> Callable[[], object]:
    return request.preload_fn or partial(request.async_fn_args.__getitem__, _BUCKETS)


def _fetch(fetchers: list[Callable[[], object]]) -> list[object]:
    """In the process that writes: bring the tensors of all to the host."""
    return [fetch() for fetch in fetchers]


def _write(calls: list[_Call], _: str, fetched: list[object]) -> None:
    """In the process that writes: what each request would have done there."""
    for (write, arguments, named), buckets in zip(calls, fetched, strict=True):
        arguments[_BUCKETS] = buckets
        write(*arguments, **named)
