"""Asynchronous saves that are merged into one request for Megatron's writer process.

Would catch: a save that is dropped or written with the tensors of another, finalize functions in
another order than the writes, tensors that are sent twice, and changes to requests of an unknown
class.
"""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any, cast

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_edit.host.checkpoint.async_saves import merge_async_requests


def fetch(buckets: list[str]) -> list[str]:
    """Stand for Megatron's copy of tensors to the host."""
    return [f"host {name}" for name in buckets]


def write(transforms: list[int], rank: int, buckets: list[str], log: str, end: str = "") -> None:
    """Stand for Megatron's write function, of which `transforms` is bound beforehand."""
    with Path(log).open("a", encoding="utf-8") as file:
        file.write(f"{transforms} {rank} {buckets} {end}\n")


def request(name: str, log: Path, done: list[str], **changes: Any) -> AsyncRequest:
    """Make the request of a save of one bucket."""
    given: dict[str, Any] = {
        "async_fn": partial(write, [7]),
        "async_fn_args": [3, [name], str(log)],
        "finalize_fns": [lambda: done.append(name)],
        "async_fn_kwargs": {"end": name.upper()},
        "preload_fn": partial(fetch, [name]),
    }
    return AsyncRequest(**given | changes)


def run(one: AsyncRequest) -> bytes:
    """Do what the queue and the writer process do with a request; return the pickled request."""
    assert one.async_fn is not None and one.preload_fn is not None
    sent = pickle.dumps(one._replace(finalize_fns=[]))
    theirs: AsyncRequest = pickle.loads(sent)
    arguments = list(theirs.async_fn_args)
    arguments[1] = theirs.preload_fn()
    theirs.async_fn(*arguments, **theirs.async_fn_kwargs)
    for function in one.finalize_fns:
        function()
    return sent


def test_two_requests_are_merged(tmp_path: Path) -> None:
    """Both are written in order with their own tensors; a finalize function added later is last."""
    log, done = tmp_path / "log", list[str]()
    (one,) = merge_async_requests(
        [request("outer", log, done), request("model", log, done, preload_fn=None)]
    )
    one.add_finalize_fn(lambda: done.append("commit"))
    sent = run(one)
    assert sent.count(b"outer") == 1
    assert log.read_text() == "[7] 3 ['host outer'] OUTER\n[7] 3 ['model'] MODEL\n"
    assert done == ["outer", "model", "commit"]


def test_rank_without_data_still_finalizes(tmp_path: Path) -> None:
    """With nothing to write for one or both requests, the rank still calls all finalize
    functions."""
    log, done = tmp_path / "log", list[str]()
    nothing: dict[str, Any] = {"async_fn": None, "async_fn_args": [], "preload_fn": None}
    (one,) = merge_async_requests(
        [request("outer", log, done, **nothing), request("model", log, done)]
    )
    run(one)
    assert log.read_text().count("\n") == 1 and done == ["outer", "model"]
    (none,) = merge_async_requests(
        [request("outer", log, done, **nothing), request("m", log, done, **nothing)]
    )
    assert none.async_fn is None and len(none.finalize_fns) == 2


def test_single_and_unknown_requests_are_returned_as_is(tmp_path: Path) -> None:
    """A single request and requests of an unknown class are not merged."""

    class Foreign(AsyncRequest):  # type: ignore[misc]
        """A request of the resiliency extension."""

    alone: Any = request("model", tmp_path, [])
    assert merge_async_requests([alone]) == [alone] and merge_async_requests([alone])[0] is alone
    both: Any = [Foreign(*cast(Any, alone)), alone]
    assert all(a is b for a, b in zip(merge_async_requests(both), both, strict=True))
