"""Print which pairs of modes are refused, with the reason, and how many are accepted.

    python scripts/count_pairs.py

Takes each two values of different rows of `AXES`, with the default of everything else, through the
checks of a start. `make_flags_doc.py` writes the counts to docs/flags.md.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from script_errors import OneLineParser, exit_code_of

from megatron_edit.config import EditConfig
from megatron_edit.constants import ADAM
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.refusals import (
    MEGATRON_ROWS,
    MUON_ROWS,
    OVERLAP_ROWS,
    CombinationError,
    Refusal,
    Values,
    refuse,
)

# Settings of EDiT have the prefix `edit_`, as in Megatron's arguments.
LAYER_WISE = {"optimizer": "muon", "use_distributed_optimizer": True, "bf16": True}
HUB = {"edit_hub": "node0:29600", "edit_replica_name": "a", "edit_nominal_replicas": 2}
AXES: dict[str, dict[str, dict[str, Any]]] = {
    "commit": {
        "the plan alone": {"edit_hub": None, "edit_check_commits": False},
        "checked commits": {"edit_check_commits": True},
        "a hub": HUB,
    },
    "landing": {
        "landing in the forward pass": {"edit_sync_mode": "overlap", "overlap_param_gather": True},
        "blocking syncs": {"edit_sync_mode": "blocking"},
        "a delay": {"edit_delay_steps": 8},
        "landing at the next meeting": {"edit_strategy": "co2"},
    },
    "wire": {name: {"edit_sync_dtype": name} for name in ("fp32", "bf16", "int8", "int4", "int2")},
    "moments": {
        f"averaged moments {name}": {"edit_average_moments": name}
        for name in ("none", "second", "both")
    },
    "fragments": {"1 fragment": {"edit_fragments": 1}, "4 fragments": {"edit_fragments": 4}},
    "final phase": {
        "no final phase": {"edit_final_sync_fraction": 0.0},
        "a final phase": {"edit_final_sync_fraction": 0.1},
    },
    "strategy": {name: {"edit_strategy": name} for name in STRATEGIES},
    "inner optimizer": {
        **{name: {"optimizer": name} for name in ("adam", "sgd", "muon")},
        "muon layer-wise": LAYER_WISE,
    },
    "auto": {"given settings": {"edit_auto": False}, "automatic settings": {"edit_auto": True}},
}
type Choice = tuple[str, str]  # axis, value


def pairs() -> Iterator[tuple[Choice, Choice, dict[str, Any]]]:
    """Yield each pair of values of different axes, and what it sets; no contradictions."""
    for (axis, values), (other_axis, other_values) in combinations(AXES.items(), 2):
        for value, given in values.items():
            for other_value, other in other_values.items():
                if all(given.get(name, x) == x for name, x in other.items()):
                    yield (axis, value), (other_axis, other_value), given | other


def edit_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of EDiT in what a pair sets, without their prefix."""
    return {n.removeprefix("edit_"): x for n, x in given.items() if n.startswith("edit_")}


def refusal_of(given: Mapping[str, Any]) -> Refusal | None:
    """Return the row of the table that refuses what a pair sets; None: it is accepted."""
    optimizer = given.get("optimizer", ADAM)
    try:
        config = EditConfig(use_edit=True, inner_optimizer=optimizer, **edit_settings(given))
        values = Values({"optimizer": optimizer, **given, **Values.of(config)})
        refuse((*MEGATRON_ROWS, *MUON_ROWS, *OVERLAP_ROWS), values)
    except CombinationError as error:
        return error.refusal
    return None


def matrix() -> dict[tuple[Choice, Choice], Refusal | None]:
    """Return the row that refuses each pair; None for those that are accepted."""
    return {(first, second): refusal_of(given) for first, second, given in pairs()}


def counts(of: Mapping[tuple[Choice, Choice], Refusal | None]) -> tuple[int, int]:
    """Return the number of accepted and of refused pairs."""
    refused = sum(row is not None for row in of.values())
    return len(of) - refused, refused


def as_text(message: str) -> str:
    """Return a part of an error message without places for values."""
    return re.sub(r" ?\{\w+\}", "", message)


def main() -> int:
    """Print the refused pairs and the counts."""
    OneLineParser(prog="count_pairs", description=(__doc__ or "").partition("\n")[0]).parse_args()
    found = matrix()
    for ((axis, value), (other_axis, other)), row in found.items():
        if row is not None:
            why = f"{row.given.words} {as_text(row.rule)}"
            print(f"{value} ({axis}) with {other} ({other_axis}): {why}")
    accepted, refused = counts(found)
    print(f"{len(found)} pairs: {accepted} are accepted, {refused} are refused")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of("count_pairs", main))
