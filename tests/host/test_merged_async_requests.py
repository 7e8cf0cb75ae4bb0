"""Asynchronous saves that are handed over to Megatron's writing process as one.

Would catch: a save that is dropped or written with the tensors of another, what is called when they
are done in another order than they were written, tensors that are sent twice, and requests of
another kind that are taken apart.
"""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any, cast

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_edit.host.checkpoint.async_requests import merge_async_requests


def fetch(buckets: list[str]) -> list[str]:
    """As Megatron brings tensors to the host."""
    return [f"host {name}" for name in buckets]


def write(transforms: list[int], rank: int, buckets: list[str], log: str, end: str = "") -> None:
    """As Megatron writes: `transforms` is bound beforehand."""
    with Path(log).open("a", encoding="utf-8") as file:
        file.write(f"{transforms} {rank} {buckets} {end}\n")


def request(name: str, log: Path, done: list[str], **changes: Any) -> AsyncRequest:
    """A save of one bucket."""
    given: dict[str, Any] = {
        "async_fn": partial(write, [7]),
        "async_fn_args": [3, [name], str(log)],
        "finalize_fns": [lambda: done.append(name)],
        "async_fn_kwargs": {"end": name.upper()},
        "preload_fn": partial(fetch, [name]),
    }
    return AsyncRequest(**given | changes)


def run(one: AsyncRequest) -> bytes:
    """What the queue, the process that writes, and the queue again do; what was sent."""
    assert one.async_fn is not None and one.preload_fn is not None
    sent = pickle.dumps(one._replace(finalize_fns=[]))
    theirs: AsyncRequest = pickle.loads(sent)
    arguments = list(theirs.async_fn_args)
    arguments[1] = theirs.preload_fn()
    theirs.async_fn(*arguments, **theirs.async_fn_kwargs)
    for function in one.finalize_fns:
        function()
    return sent


def test_two_become_one(tmp_path: Path) -> None:
    """In their order, each with its own; what is added later is called last."""
    log, done = tmp_path / "log", list[str]()
    (one,) = merge_async_requests([request("outer", log, done), request("model", log, done, preload_fn=None)])
    one.add_finalize_fn(lambda: done.append("commit"))
    sent = run(one)
    assert sent.count(b"outer") == 1
    assert log.read_text() == "[7] 3 ['host outer'] OUTER\n[7] 3 ['model'] MODEL\n"
    assert done == ["outer", "model", "commit"]


def test_a_rank_that_has_nothing_to_write(tmp_path: Path) -> None:
    """Of one of them, or of both: it still completes both with the other ranks."""
    log, done = tmp_path / "log", list[str]()
    nothing: dict[str, Any] = {"async_fn": None, "async_fn_args": [], "preload_fn": None}
    (one,) = merge_async_requests([request("outer", log, done, **nothing), request("model", log, done)])
    run(one)
    assert log.read_text().count("\n") == 1 and done == ["outer", "model"]
    (none,) = merge_async_requests([request("outer", log, done, **nothing), request("m", log, done, **nothing)])
    assert none.async_fn is None and len(none.finalize_fns) == 2


def test_others_are_left_alone(tmp_path: Path) -> None:
    """One alone, and those of a class that we do not know."""

    class Foreign(AsyncRequest):  # type: ignore[misc]
        """Of the resiliency extension."""

    alone: Any = request("model", tmp_path, [])
    assert merge_async_requests([alone]) == [alone] and joined([alone])[0] is alone
    both: Any = [Foreign(*cast(Any, alone)), alone]
    assert all(a is b for a, b in zip(merge_async_requests(both), both, strict=True))
