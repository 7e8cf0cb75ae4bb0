"""Measure how fast one core, or a GPU, encodes and decodes the wire types.

    python benchmarks/codec_speed.py --output codec_speed.json

Speeds are GB/s of fp32 values, 4 bytes each, read by an encoder or written by a decoder, beside a
copy of these bytes in the same run. OUTPUT holds the numbers; the page, which is also printed, is
written next to it. The exit code is 1 where a target is missed. Takes a minute. With `--device
cuda`, also checks that the GPU decodes nearly the same values as the CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from frame.page import Column, Spread, table_of, target_line
from frame.study import (
    alternate_order,
    describe_environment,
    parse_quick,
    split_commas,
    write_results,
)
from torch import Tensor

from megatron_edit.comm.wire import Wire
from megatron_edit.constants import INT8, TERNARY, WIRE_TYPES
from megatron_edit.method.codec import Codec
from megatron_edit.tools.cli.words import OneLineParser

COPY = "copy"
ENCODE, FEEDBACK, DECODE, ADD = "encode", "encode, residual", "decode", "add decoded"
OPERATIONS = (ENCODE, FEEDBACK, DECODE, ADD)
TARGETS = (TERNARY, INT8)
TARGET = 1.0  # GB/s of one core, of a codec as trainings use it: with a residual where it has one
SIZES = "16777216,1048576"
SUMMED = 4  # addends of a sum, which together have the values of the shard
QUICK = {"sizes": "65537", "repeats": 2, "values": 65537}
CHECKED_NUMEL, MAX_DISTANCE = 1_000_003, 0.01  # of values that a GPU and the CPU decode


@dataclass(frozen=True)
class Case:
    """An operation on a shard.

    Attributes:
        numel: values of the shard.
        what: the wire type, or what it is compared with.
        operation: of `OPERATIONS`.
        call: does it once.
    """

    numel: int
    what: str
    operation: str
    call: Callable[[], object]


@dataclass(frozen=True)
class Speed:
    """The speed of a case, in GB/s of fp32 values, over the repeats."""

    numel: int
    what: str
    operation: str
    speed: Spread


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


def make_cases(numel: int, device: str) -> list[Case]:
    """Return the cases of shards of `numel` values; all use the same tensors."""
    values = random_values(numel).to(device)
    out, residual = torch.zeros_like(values), torch.zeros_like(values)
    cases = [Case(numel, COPY, ENCODE, lambda: out.copy_(values))]
    for codec in codecs():
        cases += codec_cases(codec, values, residual, out)
    return cases


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


def codec_cases(codec: Codec, values: Tensor, residual: Tensor, out: Tensor) -> list[Case]:
    """Return the cases of a codec. Their calls overwrite `residual` and `out`."""
    numel = values.numel()
    data, total = codec.encode(values), out[: numel // SUMMED]
    rows = codec.encode(values[: SUMMED * len(total)].view(SUMMED, -1))
    calls: dict[str, Callable[[], object]] = {
        ENCODE: lambda: codec.encode(values, out=data),
        FEEDBACK: lambda: codec.encode(values, residual=residual, out=data),
        DECODE: lambda: codec.decode(data, out),
        ADD: lambda: codec.decode_sum(rows, total),
    }
    if not codec.has_residual:
        del calls[FEEDBACK]
    return [Case(numel, codec.name, operation, call) for operation, call in calls.items()]


def measure(case: Case, num_values: int) -> float:
    """Return the speed in GB/s of fp32 values, of the calls for `num_values` values."""
    calls = max(1, num_values // case.numel)
    case.call()
    _synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        case.call()
    _synchronize()
    return calls * case.numel * 4 / (time.perf_counter() - start) / 1e9


def _synchronize() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def measure_all(
    sizes: Iterable[int], repeats: int, num_values: int, device: str = "cpu"
) -> list[Speed]:
    """Measure all cases, in reverse order in every other repeat."""
    cases = [case for numel in sizes for case in make_cases(numel, device)]
    found: defaultdict[Case, list[float]] = defaultdict(list)
    for repeat in range(repeats):
        for case in alternate_order(cases, repeat):
            found[case].append(measure(case, num_values))
    return [Speed(c.numel, c.what, c.operation, Spread.some(found[c])) for c in cases]


def check_targets(speeds: Iterable[Speed]) -> list[str]:
    """Return a line for each target: the median speed of encoding with a residual."""
    return [
        target_line(f"{s.what}, {s.numel} values: {s.operation}, GB/s", s.speed.median, TARGET,
                    is_least=True)
        for s in speeds if s.what in TARGETS and s.operation == FEEDBACK
    ]  # fmt: skip


def speed_table(speeds: Iterable[Speed]) -> str:
    """Return the table of the speeds of one size: median, and minimum to maximum."""
    by_what: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for each in speeds:
        spread = each.speed
        text = f"{spread.median:.2f} ({spread.min:.2f} to {spread.max:.2f})"
        by_what[each.what][each.operation] = text
    columns = [Column("", "what"), *(Column(name, name) for name in OPERATIONS)]
    empty: dict[str, str | None] = dict.fromkeys(OPERATIONS)
    return table_of(columns, [empty | {"what": what} | of for what, of in by_what.items()])


def make_page(args: argparse.Namespace, load: float, speeds: Sequence[Speed]) -> str:
    """Return the page: command, environment, a table for each size, targets."""
    found = describe_environment()
    where, device = "one core", f"One thread of {found['processor']}"
    option = ""
    if args.device == "cuda":
        where, option = "a GPU", "--device cuda "
        device = torch.cuda.get_device_name(0)
    lines = [
        f"# Speed of the wire types on {where}", "",
        f"    python benchmarks/codec_speed.py {option}--repeats {args.repeats} "
        f"--sizes {args.sizes} --values {args.values} --output {args.output.name}", "",
        f"GB/s of fp32 values: median of {args.repeats} repeats, and minimum to maximum.",
        f"{device}, torch {found['torch']}, Linux {found['kernel']}; load",
        f"average at the start {load:.1f}.",
    ]  # fmt: skip
    for numel in dict.fromkeys(each.numel for each in speeds):
        lines += ["", f"## {numel} values", "", speed_table(s for s in speeds if s.numel == numel)]
    return "\n".join([*lines, "", "## Targets", "", *check_targets(speeds)])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write OUTPUT and the page, print the page."""
    args = parse(argv)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    sizes = [int(size) for size in split_commas(args.sizes)]
    checked = codecs() if args.device == "cuda" else []
    distances = {codec.name: distance_from_cpu(codec, args.device) for codec in checked}
    speeds = measure_all(sizes, args.repeats, args.values, args.device)
    names = ("device", "sizes", "repeats", "values")
    configuration = {name: getattr(args, name) for name in names}
    own = {
        "versions": describe_environment(), "configuration": configuration, "load": load,
        "speeds": speeds, "distances": distances,
    }  # fmt: skip
    write_results(args.output, "codec_speed", own)
    page = make_page(args, load, speeds)
    page += "".join(
        "\n" + target_line(f"{name}: distance from the values on the CPU", found, MAX_DISTANCE)
        for name, found in distances.items()
    )
    args.output.with_suffix(".md").write_text(page + "\n", encoding="utf-8")
    print(page)
    return int(" MISS" in page)


if __name__ == "__main__":
    raise SystemExit(main())
