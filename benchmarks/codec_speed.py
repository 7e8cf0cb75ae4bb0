"""Measure how fast one core, or a GPU, encodes and decodes the wire types.

    python benchmarks/codec_speed.py --output codec_speed.json

Speeds are GB/s of fp32 values, 4 bytes each, read by an encoder or written by a decoder, beside a
copy of these bytes in the same run. OUTPUT holds the numbers; the page, which is also printed, is
written next to it. Takes a minute. With `--device cuda`, also checks that the GPU decodes nearly
the same values as the CPU; the exit code is 1 where it does not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from frame.page import Spread, table, target_line
from frame.study import (
    alternate_order,
    describe_environment,
    parse_quick,
    split_commas,
    write_results,
)
from torch import Tensor

from megatron_edit.comm.wire import Wire
from megatron_edit.constants import WIRE_TYPES
from megatron_edit.method.codec import Codec
from megatron_edit.tools.cli.words import OneLineParser

COPY = "copy"
ENCODE, FEEDBACK, DECODE, ADD = "encode", "encode, residual", "decode", "add decoded"
OPERATIONS = (ENCODE, FEEDBACK, DECODE, ADD)
SIZES = "16777216,1048576"
SUMMED = 4  # addends of a sum, which together have the values of the shard
QUICK = {"sizes": "65537", "repeats": 2, "values": 65537}
CHECKED_NUMEL, MAX_DISTANCE = 1_000_003, 0.01  # of values that a GPU and the CPU decode

type Name = tuple[int, str, str]  # values of a shard, wire type, operation


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(prog="codec_speed", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file; the page is written next to it")
    add("--quick", action="store_true", help="a smoke test: one small shard, two repeats")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    add("--sizes", default=SIZES, help=f"values of the shards (default: {SIZES})")
    add("--repeats", type=int, default=9, help="of all cases, in alternating order (default: 9)")
    add("--values", type=int, default=1 << 24, help="values of a measurement, in as many calls as "
        "needed (default: 16777216)")  # fmt: skip
    args = parse_quick(parser, list(sys.argv[1:] if argv is None else argv), QUICK)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU; without one: --device cpu")
    return args


def random_values(numel: int) -> Tensor:
    """Return values of the size of pseudo-gradients, on the CPU, the same in every call."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 1e-3


def codecs() -> list[Codec]:
    """Return the codecs of all wire types that have one."""
    return [codec for name in WIRE_TYPES if (codec := Wire.of(name).codec) is not None]


def make_calls(numel: int, device: str) -> dict[Name, Callable[[], object]]:
    """Return the measured operations on shards of `numel` values; all use the same tensors."""
    values = random_values(numel).to(device)
    out, residual = torch.zeros_like(values), torch.zeros_like(values)
    calls: dict[Name, Callable[[], object]] = {(numel, COPY, ENCODE): lambda: out.copy_(values)}
    for codec in codecs():
        for operation, call in _calls_of(codec, values, residual, out).items():
            calls[numel, codec.name, operation] = call
    return calls


def _calls_of(
    codec: Codec, values: Tensor, residual: Tensor, out: Tensor
) -> dict[str, Callable[[], object]]:
    """Return the operations of a codec. They overwrite `residual` and `out`."""
    data, total = codec.encode(values), out[: values.numel() // SUMMED]
    rows = codec.encode(values[: SUMMED * len(total)].view(SUMMED, -1))
    calls: dict[str, Callable[[], object]] = {
        ENCODE: lambda: codec.encode(values, out=data),
        DECODE: lambda: codec.decode(data, out),
        ADD: lambda: codec.decode_sum(rows, total),
    }
    if codec.has_residual:
        calls[FEEDBACK] = lambda: codec.encode(values, residual=residual, out=data)
    return calls


def distance_from_cpu(codec: Codec, device: str, numel: int = CHECKED_NUMEL) -> float:
    """Return the relative distance of decoded values on a device from those on the CPU.

    It is not 0, as sums and quotients round differently on a GPU.
    """
    values = random_values(numel)
    residual = values.flip(0) * 0.5

    def decoded(where: str) -> Tensor:
        given = {"residual": residual.clone().to(where)} if codec.has_residual else {}
        out = torch.zeros(numel, device=where)
        codec.decode(codec.encode(values.to(where), **given), out)
        return out.cpu()

    expected = decoded("cpu")
    return float((decoded(device) - expected).norm() / expected.norm())


def measure(call: Callable[[], object], numel: int, num_values: int) -> float:
    """Return the speed in GB/s of fp32 values, of the calls for `num_values` values."""
    calls = max(1, num_values // numel)
    call()
    _synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize()
    return calls * numel * 4 / (time.perf_counter() - start) / 1e9


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measure_all(args: argparse.Namespace) -> dict[Name, Spread]:
    """Measure all operations, in reverse order in every other repeat."""
    calls: dict[Name, Callable[[], object]] = {}
    for size in split_commas(args.sizes):
        calls |= make_calls(int(size), args.device)
    found: defaultdict[Name, list[float]] = defaultdict(list)
    for repeat in range(args.repeats):
        for name in alternate_order(list(calls), repeat):
            found[name].append(measure(calls[name], name[0], args.values))
    return {name: Spread.some(found[name]) for name in calls}


def speed_table(speeds: dict[Name, Spread], numel: int) -> str:
    """Return the table of the speeds of one size: median, and minimum to maximum."""

    def cell(what: str, operation: str) -> str:
        spread = speeds.get((numel, what, operation))
        return f"{spread.median:.2f} ({spread.min:.2f} to {spread.max:.2f})" if spread else ""

    types = dict.fromkeys(what for size, what, _ in speeds if size == numel)
    rows = [[what, *(cell(what, operation) for operation in OPERATIONS)] for what in types]
    return table(["", *OPERATIONS], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write OUTPUT and the page, print the page."""
    args = parse(argv)
    torch.set_num_threads(1)
    load, environment = os.getloadavg()[0], describe_environment()
    checked = codecs() if args.device == "cuda" else []
    distances = {codec.name: distance_from_cpu(codec, args.device) for codec in checked}
    speeds = measure_all(args)
    on_gpu = args.device == "cuda"
    core = f"One thread of {environment['processor']}"
    device = torch.cuda.get_device_name(0) if on_gpu else core
    page = [
        f"# Speed of the wire types on {'a GPU' if on_gpu else 'one core'}", "",
        f"    python benchmarks/codec_speed.py --device {args.device} --repeats {args.repeats} "
        f"--sizes {args.sizes} --values {args.values} --output {args.output.name}", "",
        f"GB/s of fp32 values: median of {args.repeats} repeats, and minimum to maximum.",
        f"{device}, torch {environment['torch']}, Linux {environment['kernel']}; load",
        f"average at the start {load:.1f}.",
    ]  # fmt: skip
    for numel in dict.fromkeys(size for size, _, _ in speeds):
        page += ["", f"## {numel} values", "", speed_table(speeds, numel)]
    page += [target_line(f"{name}: distance from the values on the CPU", found, MAX_DISTANCE)
             for name, found in distances.items()]  # fmt: skip
    results: dict[str, Any] = {
        "versions": environment, "load": load, "distances": distances,
        "configuration": {n: getattr(args, n) for n in ("device", "sizes", "repeats", "values")},
        "speeds": [{"numel": n, "what": what, "operation": operation, "speed": speed}
                   for (n, what, operation), speed in speeds.items()],
    }  # fmt: skip
    write_results(args.output, "codec_speed", results)
    text = "\n".join(page)
    args.output.with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(any(found > MAX_DISTANCE for found in distances.values()))


if __name__ == "__main__":
    raise SystemExit(main())
