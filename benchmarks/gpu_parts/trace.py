"""What a trace of torch's profiler says of the engine: launches and device time by its marks.

The engine marks what it does with `record_function("edit/...")`. A launch belongs to the innermost
mark that was open on its thread; what runs on the device belongs to its launch. Without a device an
operator counts as a launch, and those that it calls do not.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "edit/"
LAUNCHES = ("cuda_runtime", "cuda_driver")
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
TRANSFERS = ("nccl", "dtoh", "htod")  # in the names of what carries data between ranks


@dataclass(frozen=True)
class MarkReading:
    """All that was done under a mark, but for what other marks inside it have.

    Attributes:
        mark: its name.
        count: how often it was set.
        host_ms: of all marks of this name.
        launches: of kernels, copies and fills; of operators, without a device.
        device_ms: sum over kernels, copies and fills, transfers left out; None without a device.
        transfer_ms: of collectives, waiting for other ranks included, and of copies from and to the
            host, which gloo needs.
    """

    mark: str
    count: int
    host_ms: float
    launches: int
    device_ms: float | None
    transfer_ms: float | None


@dataclass(frozen=True)
class _Span:
    """An interval on a thread, in microseconds."""

    begin: float
    end: float
    name: str

    @classmethod
    def of(cls, event: dict[str, Any]) -> _Span:
        return cls(event["ts"], event["ts"] + event["dur"], event["name"])


def read_trace(path: Path) -> list[MarkReading]:
    """Of a file that torch's profiler wrote, by the marks' names; none where there are no marks."""
    with gzip.open(path, "rt", encoding="utf-8") as source:
        return readings(json.load(source)["traceEvents"])


def readings(events: Iterable[dict[str, Any]]) -> list[MarkReading]:
    """Of the events of a trace."""
    whole = [event for event in events if event.get("ph") == "X"]
    marks: dict[Any, list[_Span]] = defaultdict(list)
    for event in whole:
        # "gpu_user_annotation" is the same mark once more, as the device saw it.
        if event["name"].startswith(PREFIX) and event.get("cat") == "user_annotation":
            marks[event["tid"]].append(_Span.of(event))
    on_device = _by_correlation(event for event in whole if event.get("cat") in ON_DEVICE)
    launches = [event for event in whole if _correlation(event) in on_device
                and event.get("cat") in LAUNCHES]  # fmt: skip
    if not on_device:
        launches = _outermost([event for event in whole if event.get("cat") == "cpu_op"])
    found: dict[str, list[dict[str, Any]]] = {
        span.name: [] for spans in marks.values() for span in spans
    }
    for tid, spans in marks.items():
        ordered = sorted(spans, key=lambda span: span.begin)
        for event in launches:
            if event["tid"] == tid and (span := _innermost(ordered, event["ts"])) is not None:
                found[span.name].append(event)
    all_spans = [span for spans in marks.values() for span in spans]
    return [_reading(name, all_spans, found[name], on_device) for name in sorted(found)]


def _reading(
    name: str,
    spans: Sequence[_Span],
    launches: Sequence[dict[str, Any]],
    on_device: dict[int, list[dict[str, Any]]],
) -> MarkReading:
    own = [span for span in spans if span.name == name]
    kernels = [each for event in launches for each in on_device.get(_correlation(event), [])]
    transfers = [
        each for each in kernels if any(name in each["name"].lower() for name in TRANSFERS)
    ]
    total, wire = (sum(each["dur"] for each in some) / 1e3 for some in (kernels, transfers))
    return MarkReading(
        mark=name,
        count=len(own),
        host_ms=sum(span.end - span.begin for span in own) / 1e3,
        launches=len(launches),
        device_ms=total - wire if on_device else None,
        transfer_ms=wire if on_device else None,
    )


def _correlation(event: dict[str, Any]) -> int:
    """What a launch and that which it launched have in common; -1 if nothing."""
    return int(event.get("args", {}).get("correlation", -1))


def _by_correlation(events: Iterable[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    found: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        found[_correlation(event)].append(event)
    found.pop(-1, None)
    return found


def _innermost(ordered: Sequence[_Span], moment: float) -> _Span | None:
    """The span that began last of those that are open; `ordered` by their beginnings."""
    last = bisect_right(ordered, moment, key=lambda span: span.begin)
    return next((span for span in reversed(ordered[:last]) if span.end > moment), None)


def _outermost(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operators that no other operator of their thread called."""
    found, until = list[dict[str, Any]](), dict[Any, float]()
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= until.get(event["tid"], float("-inf")):
            until[event["tid"]] = event["ts"] + event["dur"]
            found.append(event)
    return found
