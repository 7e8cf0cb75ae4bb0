"""The words that `plan`, `check`, `doctor` and `compare` share: sizes, links, replicas, flags.

A training is given in the same way everywhere: a script (.py), files of flags (.args), flags, or
any of these, the script and the files before the first flag. So the name of a command can be
replaced by another one, whatever each of them needs of the rest.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron_edit.comm.placement import (
    arrange,
    host_lines,
    parse_placement,
    places_of,
    read_placement,
    straddling_warnings,
)
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError, to_one_line
from megatron_edit.flags import flag
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
_TYPO = 0.85  # similarity above which an unknown flag is a misspelt option


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


def add_replicas(parser: ArgumentParser) -> None:
    """Add `--replicas`."""
    parser.add_argument("--replicas", type=int, metavar="N", help=f"the same as {NUM_REPLICAS} N")


_SHARED: Mapping[str, str] = {
    "--world-size": "ranks of the launch",
    "--hosts": "hosts of the launch, to show which replica is on which: node1,node2 for equal "
    "numbers of ranks, node1:8,node2:4 for others",
    "--link": "bandwidth of a host: 10Gbit, 100Mbit, 1.25GB (b: bits, B: bytes)",
    "--latency": "of the link: 20ms (default: 0)",
    "--step-time": "of a step without exchanges between replicas: 350ms, 2.5s, or 2.5 (seconds)",
    "--gpu-tflops": "TFLOP/s of a device, to compute the time of a step",
    "--device-memory": "80GB, to check whether the training fits",
}
SHARED = tuple(_SHARED)
_TYPES: Mapping[str, type] = {"--world-size": int, "--gpu-tflops": float}


def add_shared_words(parser: ArgumentParser, used: Collection[str], *, ranks: str = "") -> None:
    """Add the options that `plan`, `check` and `doctor` share.

    Args:
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
            None if hosts is None else parse_hosts(hosts, options.world_size),
        )

    def hosts_of(self, config: EditConfig) -> list[str] | None:
        """Return the host of each rank of a single launch; None without `--hosts`.

        Raises:
            UsageError: each replica has its own launch.
        """
        if self.hosts is not None and (config.replica_id is not None or config.hub is not None):
            name = flag("replica_id" if config.hub is None else "hub")
            rule = f"are those of a single launch, and {name} is given"
            raise UsageError("--hosts", rule, "drop --hosts")
        return self.hosts


# ---- Hosts of a launch that is not started yet, as given to `megatron-edit check --hosts`


_NAME = re.compile(r"[A-Za-z0-9._-]+")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


def parse_hosts(text: str, world_size: int | None) -> list[str]:
    """Return the host of each rank of a launch.

    Args:
        text: value of `--hosts`.
        world_size: ranks of the launch; may be None where the numbers of ranks are given.

    Raises:
        UsageError: the text has another form, or does not give `world_size` ranks.
    """
    pairs = (entry.strip().partition(":") for entry in text.split(","))
    names, _, numbers = zip(*pairs, strict=True)
    has_numbers = all(map(_NUMBER.fullmatch, numbers))
    is_list = all(map(_NAME.fullmatch, names)) and len(set(names)) == len(names)
    if not is_list or not (has_numbers or text.count(":") == 0):
        rule = "must name each host once, all with a number of ranks or none"
        remedy = "write node1:8,node2:4; with SLURM: scontrol show hostnames | paste -sd,"
        raise UsageError(f"--hosts {text}", rule, remedy)
    if not has_numbers:
        if world_size is None or world_size % len(names):
            found = "is not given" if world_size is None else f"{world_size} is no multiple of them"
            rule = f"names {len(names)} hosts, and --world-size {found}"
            raise UsageError(f"--hosts {text}", rule, "give the ranks of each host: node1:8")
        numbers = (str(world_size // len(names)),) * len(names)
    check_ranks("--hosts", sum(map(int, numbers)))
    hosts = [name for name, num in zip(names, numbers, strict=True) for _ in range(int(num))]
    if world_size is not None and len(hosts) != world_size:
        rule = f"gives {len(hosts)} ranks, and --world-size {world_size}"
        raise UsageError(f"--hosts {text}", rule, "drop --world-size, or correct one of them")
    return hosts


def check_placement(config: EditConfig, num_replicas: int) -> str | None:
    """Return the content of the file that `--edit-placement` names; None if it names none.

    Raises:
        UsageError: it cannot be read, or has no line for each replica.
    """
    text = read_placement(config.placement)
    if text is not None:
        parse_placement(text, config.placement, num_replicas)
    return text


def ranks_by_host(config: EditConfig, hosts: list[str], num_replicas: int) -> list[dict[str, int]]:
    """Return for each replica the number of its ranks on each of its hosts.

    Raises:
        UsageError: the file that `--edit-placement` names cannot be used.
    """
    text = check_placement(config, num_replicas)
    return arrange(hosts, num_replicas, config.placement, text).counts()


def places(config: EditConfig, counts: Sequence[Mapping[str, int]]) -> tuple[int, ...]:
    """Return the place of each replica, see `places_of`.

    Args:
        config: may name a file with sites.
        counts: see `ranks_by_host`.
    """
    if not counts:
        return ()
    text = check_placement(config, len(counts))
    sites = () if text is None else parse_placement(text, config.placement, len(counts))[1]
    return places_of(counts, sites)


def placement_lines(counts: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """Yield which replica is on which hosts, and warnings, as at the start of a run.

    Args:
        counts: see `ranks_by_host`.
    """
    yield from host_lines(counts)
    for line in straddling_warnings(counts):
        yield f"warning: {line}"


# ---- Functions that several subcommands share


class OneLineParser(ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Print the error in one line, without the usage, and exit with 2."""
        self.exit(2, to_one_line(f"{self.prog}: {message}; see --help") + "\n")


def refuse_rest(command: str, rest: Sequence[str]) -> None:
    """Refuse unknown arguments of a subcommand that takes no training command.

    Raises:
        UsageError: there are some.
    """
    if rest:
        raise UsageError(
            " ".join(rest), f"is not an argument of {command}", f"see {command} --help"
        )


def refuse_removed(
    command: str, argv: Sequence[str], removed: Collection[str], own: Sequence[str] = ()
) -> None:
    """Refuse options that a subcommand no longer has, and misspelt ones; others are the training's.

    Raises:
        UsageError: there is one.
    """
    for name in canonical(argv):
        if name in removed:
            raise UsageError(name, f"is no option of {command} any more", "see docs/changelog.md")
        if close := difflib.get_close_matches(name, own, n=1, cutoff=_TYPO):
            raise UsageError(name, f"is no option of {command}", f"did you mean {close[0]}?")


def search_megatron_as_launch(folder: Path | None) -> None:
    """Search for Megatron in the script's folder, then in the current one, as a launch does.

    `python -m`, by which `torchrun` starts the launcher, has the current folder on its path; the
    command `megatron-edit` has not, and would find an installed wheel instead of a clone.

    Args:
        folder: of the script; None without one.
    """
    first = [] if folder is None else [str(folder.resolve())]
    first += [] if sys.flags.safe_path else [""]
    sys.path[:] = [*first, *(path for path in sys.path if path not in first)]


def check_installed(*names: str) -> None:
    """Check that libraries of the extra `report` are installed.

    Raises:
        UsageError: one is missing.
    """
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"{', '.join(missing)} (not installed)",
            "needed for pictures, page and progress",
            "pip install 'megatron_edit[report]'",
        )
