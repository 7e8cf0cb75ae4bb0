"""The runs of a comparison, as immutable data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_edit.atomic_files import write_atomic
from megatron_edit.comm.placement import Placement, place
from megatron_edit.command_line import config_from_argv
from megatron_edit.constants import COMPACT_JSON
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.tools.compare.entries import STOCK, Entry
from megatron_edit.tools.compare.flags import canonical, check_reductions, int_flag

# Of configurations and results; another number invalidates all stored results. A configuration
# holds the given flags only, so a changed default needs another number, too.
FORMAT = 5
HASH_DIGITS = 16  # 64 bits: collisions within a study are practically impossible
EVENTS = "events"
_OWN = "is set run by run"
_NO_HUB = "belongs to elastic runs: runs of a comparison have no hub"
# Flags that the comparison sets itself, that would make all runs write to the same place, or that
# belong to several launches: by flag, what is wrong.
_RESERVED = {
    "--save": _OWN,
    **dict.fromkeys(map(flag, ("strategy", "log_dir", "replica_id", "rendezvous")), _OWN),
    **dict.fromkeys(map(flag, ("hub", "hub_token_file", "replica_name", "nominal_replicas",
                               "min_replicas")), _NO_HUB),
}  # fmt: skip


@dataclass(frozen=True)
class ComparisonSetting:
    """The common settings of all runs."""

    script: Path  # the training script
    flags: tuple[str, ...]  # its flags, Megatron's and EDiT's, without those of single entries
    num_ranks: int
    # Command that starts the ranks; empty for torchrun on this machine.
    launcher: tuple[str, ...] = ()
    link: str = ""  # the user's description of the link between replicas

    @property
    def warmup_steps(self) -> int:
        """W, if it is given for all runs; else 0."""
        try:
            return int_flag(self.flags, flag("warmup_steps"))
        except KeyError:
            return 0


@dataclass(frozen=True)
class RunPlan:
    """One training."""

    entry: Entry
    seed: int | None  # Megatron's; None is that of the common flags
    setting: ComparisonSetting

    @property
    def name(self) -> str:
        """Label and seed, for messages."""
        return self.entry.label + ("" if self.seed is None else f", seed {self.seed}")

    @property
    def words(self) -> list[str]:
        """Flags of the training script, without output folders."""
        seed = [] if self.seed is None else ["--seed", str(self.seed)]
        return [*self.entry.words(self.setting.flags), *seed]

    @property
    def configuration(self) -> dict[str, Any]:
        """Everything that determines what the run computes."""
        setting = self.setting
        return {
            "form": FORMAT,
            "script": hashlib.sha256(setting.script.read_bytes()).hexdigest(),
            "flags": canonical(self.words),
            "kind": STOCK if self.entry.strategy is None else self.entry.name,
            "num_ranks": setting.num_ranks,
            "launcher": list(setting.launcher),
            "link": setting.link,
        }

    @property
    def folder_name(self) -> str:
        """Name of the run's folder."""
        seed = "" if self.seed is None else f"-seed{self.seed}"
        return f"{self.entry.slug}{seed}-{configuration_hash(self.configuration)}"

    def script_words(self, folder: Path) -> list[str]:
        """Return the training script and all its flags, with the run's own folder."""
        words = self.words
        if self.entry.strategy is not None:
            words += [flag("log_dir"), str(folder / EVENTS)]
        return [str(self.setting.script), *words]

    @property
    def placement(self) -> Placement:
        """The placement of rank 0, with N and K.

        Stock Megatron has no replicas: its traffic is counted as if each machine held K ranks.

        Raises:
            UsageError: N is not given, or does not divide the ranks.
        """
        words = self.words if self.entry.strategy else Entry("edit").words(self.setting.flags)
        environment = {"RANK": "0", "WORLD_SIZE": str(self.setting.num_ranks)}
        config = config_from_argv(words)
        return place(config.num_replicas, config.replica_id, environment)


def make_plan(
    setting: ComparisonSetting, entries: Sequence[Entry], seeds: Sequence[int]
) -> tuple[RunPlan, ...]:
    """Return all runs: every entry with the first seed, then every entry with the next.

    Raises:
        UsageError: a setting with which no run could start.
    """
    _check_setting(setting)
    _check_seeds(seeds)
    runs = [RunPlan(entry, seed, setting) for seed in seeds or (None,) for entry in entries]
    seen: dict[str, RunPlan] = {}
    for run in runs:
        _check_run(run)
        other = seen.setdefault(configuration_hash(run.configuration), run)
        if other is not run:
            raise UsageError(
                f"--strategies {run.entry.label}",
                f"is the same as {other.entry.label}",
                "list it once",
            )
    return tuple(runs)


def _check_setting(setting: ComparisonSetting) -> None:
    if setting.num_ranks < 1:
        raise UsageError(
            f"--nproc-per-node {setting.num_ranks}",
            "must be at least 1",
            "give the ranks of all replicas together",
        )
    given = canonical(setting.flags)
    for name, rule in _RESERVED.items():
        if name in given:
            raise UsageError(" ".join([name, *given[name]]), rule, "drop it")
    try:
        int_flag(setting.flags, "--seq-length")
    except (KeyError, ValueError) as error:
        raise UsageError(
            "--seq-length", "must be given as a number: tokens are counted with it", "add it"
        ) from error
    if "" in given:
        raise UsageError(
            " ".join(given[""]), "belongs to no flag", "give the script first, then its flags"
        )


def _check_seeds(seeds: Sequence[int]) -> None:
    repeated = sorted({seed for seed in seeds if seeds.count(seed) > 1})
    if repeated or any(seed < 1 for seed in seeds):
        raise UsageError(
            f"--seeds {','.join(map(str, seeds))}",
            "must be different whole numbers above 0",  # Megatron refuses 0
            "give for example 1,2,3",
        )


def _check_run(run: RunPlan) -> None:
    own = canonical(run.entry.own_flags)
    for name, rule in {**_RESERVED, "--seed": _OWN}.items():
        if name in own:
            raise UsageError(f"--strategies {run.entry.label}", f"{name} {rule}", "drop it")
    config_from_argv(run.words)  # all raise on invalid flags
    _ = run.placement
    if run.entry.strategy is None:
        check_reductions(run.entry.label, run.words)


# ---- Marks of finished runs, with the hash of their configuration: everything that determines what
# a run computes, as JSON, without the machine and the output folder. A run with the same one is not
# repeated.


def configuration_hash(configuration: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits, independent of the order of keys in mappings."""
    text = json.dumps(configuration, sort_keys=True, separators=COMPACT_JSON, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:HASH_DIGITS]


def store_finished(path: Path, configuration: Mapping[str, Any]) -> None:
    """Write the mark of a run, atomically."""
    record = {"hash": configuration_hash(configuration), "configuration": configuration}
    write_atomic(path, json.dumps(record) + "\n")


def is_finished(path: Path, configuration: Mapping[str, Any]) -> bool:
    """Return whether there is a mark of exactly this configuration."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return bool(record["hash"] == configuration_hash(configuration))
    except (OSError, ValueError, KeyError, TypeError):
        return False  # missing or not a mark: the run is repeated
