"""The words that `plan`, `check`, `doctor` and `compare` share: sizes, links, replicas, flags.

A training is given in the same way everywhere: a script (.py), files of flags (.args), flags, or
any of these, the script and the files before the first flag. So the name of a command can be
replaced by another one, whatever each of them needs of the rest.
"""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.tools.cli import host_list
from megatron_edit.tools.compare.flags import canonical, read_flags_or_refuse
from megatron_edit.tools.plan.values import (
    check_number,
    check_ranks,
    parse_bytes,
    parse_rate,
    parse_seconds,
    shortened,
)

SCRIPT, FLAGS = "script", "flags"  # what a word before all flags is that is no .py and no .args
FLAG_FILE, PYTHON = ".args", ".py"
NUM_REPLICAS = flag("num_replicas")


@dataclass(frozen=True)
class TrainingCommand:
    """The training that a command line names.

    Attributes:
        script: as given; None without one.
        argv: its flags: those of files first, then those of the command line.
    """

    script: str | None
    argv: tuple[str, ...]

    @classmethod
    def of(cls, rest: Sequence[str], others: str | None = None) -> TrainingCommand:
        """Read the words that are none of the command's own.

        Args:
            rest: these words, in their order.
            others: what a first word is that ends neither in .py nor in .args: `SCRIPT` or `FLAGS`;
                None refuses it. What follows a script is passed on to it.

        Raises:
            UsageError: a file cannot be read, or a word is neither a script nor a file.
        """
        words = list(rest)
        first_flag = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
        script, argv = None, list[str]()
        for word in words[:first_flag]:
            kind = (
                FLAGS if word.endswith(FLAG_FILE) else SCRIPT if word.endswith(PYTHON) else others
            )
            if kind == FLAGS:
                remedy = "give .args files first, flags after them"
                argv += read_flags_or_refuse(Path(word), f"file of flags {word}", remedy)
            elif script is not None:
                argv.append(word)
            elif kind == SCRIPT:
                script = word
            else:
                rule = "is neither a training script (.py) nor a file of flags (.args)"
                raise UsageError(word or "(an empty word)", rule, "correct it, or drop it")
        return cls(script, (*argv, *words[first_flag:]))

    def check_replicas(self, replicas: int | None) -> None:
        """Check the value of `--replicas`.

        Raises:
            UsageError: it is out of range, or the flags have another number.
        """
        if replicas is None:
            return
        check_ranks("--replicas", replicas)
        given = canonical(self.argv).get(NUM_REPLICAS, [str(replicas)])
        if given != [str(replicas)]:
            raise UsageError(
                f"--replicas {replicas}, {NUM_REPLICAS} {shortened(' '.join(given))}",
                "must be the same number",
                f"drop --replicas, or give {NUM_REPLICAS} {replicas} after all files",
            )

    def with_replicas(self, replicas: int | None) -> TrainingCommand:
        """Return the training with `--edit-num-replicas` as given by `--replicas`.

        Raises:
            UsageError: the number is out of range, or the flags have another one.
        """
        self.check_replicas(replicas)
        if replicas is None or NUM_REPLICAS in canonical(self.argv):
            return self
        return TrainingCommand(self.script, (*self.argv, NUM_REPLICAS, str(replicas)))


def add_replicas(parser: argparse.ArgumentParser) -> None:
    """Add `--replicas`."""
    parser.add_argument("--replicas", type=int, metavar="N", help=f"the same as {NUM_REPLICAS} N")


_SHARED: Mapping[str, str] = {
    "--world-size": "ranks of the launch",
    "--hosts": host_list.HELP,
    "--link": "bandwidth of a host: 10Gbit, 100Mbit, 1.25GB (b: bits, B: bytes)",
    "--latency": "of the link: 20ms (default: 0)",
    "--step-time": "of a step without exchanges between replicas: 350ms, 2.5s, or 2.5 (seconds)",
    "--gpu-tflops": "TFLOP/s of a device, to compute the time of a step",
    "--device-memory": "80GB, to check whether the training fits",
}
SHARED = tuple(_SHARED)
_TYPES: Mapping[str, type] = {"--world-size": int, "--gpu-tflops": float}


def add_shared_words(
    parser: argparse.ArgumentParser, used: Collection[str], *, ranks: str = ""
) -> None:
    """Add the options that `plan`, `check` and `doctor` share.

    Args:
        parser: of the subcommand.
        used: options that matter to it; it accepts the others, and checks their values.
        ranks: default of `--world-size`, for the help.
    """
    parser.allow_abbrev = False  # an abbreviation could be a flag of the training
    add_replicas(parser)
    for name, text in _SHARED.items():
        default = f" (default: {ranks})" if ranks and name == "--world-size" else ""
        shown = (
            f"{text}{default}" if name in used else "accepted as by the other commands, not used"
        )
        parser.add_argument(name, type=_TYPES.get(name, str), help=shown)


@dataclass(frozen=True)
class SharedValues:
    """Values of the shared options; None where they are not given.

    Attributes:
        link: bits per second.
        latency: seconds; 0 by default.
        step: seconds.
        tflops: 10^12 FLOP/s of a device.
        memory: bytes of a device.
        hosts: host of each rank of the launch.
    """

    link: float | None
    latency: float
    step: float | None
    tflops: float | None
    memory: float | None
    hosts: list[str] | None

    @classmethod
    def of(cls, options: Namespace) -> SharedValues:
        """Parse the values.

        Raises:
            UsageError: one is no size, no rate or no time, or out of range.
        """
        link, latency, step = options.link, options.latency, options.step_time
        tflops, memory, hosts = options.gpu_tflops, options.device_memory, options.hosts
        check_number("--gpu-tflops", tflops)
        return cls(
            None if link is None else parse_rate("--link", link),
            0.0
            if latency is None
            else parse_seconds("--latency", latency, least=-1, needs_unit=True),
            None if step is None else parse_seconds("--step-time", step),
            tflops,
            None if memory is None else parse_bytes("--device-memory", memory),
            None if hosts is None else host_list.parse_hosts(hosts, options.world_size),
        )

    def hosts_of(self, config: EditConfig) -> list[str] | None:
        """Return the host of each rank of a single launch; None without `--hosts`.

        Raises:
            UsageError: each replica has its own launch.
        """
        if self.hosts is not None:
            host_list.refuse_own_launches(config)
        return self.hosts
