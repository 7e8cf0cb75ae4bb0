"""Parameter groups of a resumed run, and the saved ones that they continue."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_edit.errors import UsageError
from megatron_edit.host.checkpoint.param_groups import resumed_groups

KINDS = [{"wd_mult": 1.0}, {"wd_mult": 0.0}, {"wd_mult": 1.0, "default_config": False}]


def groups(*rates: tuple[float, float], step: int = 0) -> list[dict[str, object]]:
    """Return a group of each kind, the last one with a rate of its own."""
    plain = {"default_config": True, "is_expert_parallel": False, "lr_mult": 1.0, "step": step}
    return [
        {**plain, **kind, "max_lr": most, "min_lr": least}
        for kind, (most, least) in zip(KINDS, rates, strict=True)
    ]


OLD = ((1e-3, 1e-5), (1e-3, 1e-5), (2e-3, 1e-4))
NEW = ((5e-4, 1e-6), (5e-4, 1e-6), (1e-3, 1e-5))  # the last is at the old rates of the others


def flags(**given: bool) -> Namespace:
    """Return Megatron's arguments."""
    values = {"override_opt_param_scheduler": False, "use_checkpoint_opt_param_scheduler": False}
    return Namespace(load="runs/a", **values | given)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize(
    "flag", ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"]
)
def test_groups_are_paired_by_kind(order: tuple[int, ...], flag: str) -> None:
    """Would catch a group that takes the state of another one: they differ in their rates alone,
    and a new rate may be the old one of another group."""
    saved = groups(*OLD, step=7)
    found = resumed_groups(groups(*NEW), [saved[index] for index in order], flags(**{flag: True}))
    expected = NEW if flag.startswith("override") else OLD
    assert found == groups(*expected, step=7)


def test_groups_at_the_same_rates_are_paired_first() -> None:
    """Two groups with rates of their own, of which one has a new rate."""
    plain = {"wd_mult": 1.0, "default_config": False}
    saved: list[dict[str, object]] = [
        {**plain, "max_lr": rate, "step": rate} for rate in (1.0, 2.0)
    ]
    found = resumed_groups(
        [{**plain, "max_lr": 3.0}, {**plain, "max_lr": 1.0}],
        saved,
        flags(override_opt_param_scheduler=True),
    )
    assert [group["step"] for group in found] == [2.0, 1.0]


def test_group_that_the_checkpoint_lacks_is_refused() -> None:
    """`--decoupled-lr` given anew."""
    with pytest.raises(UsageError, match="--decoupled-lr"):
        resumed_groups(groups(*NEW), groups(*OLD)[:2], flags(override_opt_param_scheduler=True))
