"""The table of refused combinations: what is given, with what, why, and what to do instead.

A combination that becomes supported is a row (or an entry of a loop over names) to delete. The
checks of `EditConfig`, of Megatron's arguments and of Megatron-Bridge's configuration read the
table, and `docs/flags.md` shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_edit.constants import (
    ADACOMM,
    ADAM,
    ALL,
    AUTO,
    AUTO_STRATEGIES,
    AUTO_WARMUP_STEPS,
    BLOCKING,
    DEFAULT_STRATEGY,
    FIXED,
    FP8_GATHER_RECIPES,
    FP32,
    GLOO,
    MUON,
    NONE,
    OPTIMIZERS_WITH_MOMENTS,
    OVERLAP,
    QSR,
    STL,
    SUPPORTED_OPTIMIZERS,
    TOP64,
)
from megatron_edit.errors import UsageError
from megatron_edit.flags import attribute, flag, flag_of, format_value, preset_of
from megatron_edit.method.auto import AUTO_SETTINGS
from megatron_edit.method.settings import Settings
from megatron_edit.method.strategy import STRATEGIES

# Settings without effect: with timed strategies, with an endless warm-up, without a penalty.
STEP_COUNT_SETTINGS = ("sync_interval", "interval", "qsr_a", "stl_stages")
SYNC_SETTINGS = (
    "fragments", "delay_steps", "mix", "average_moments", "average_moments_every", "scale_beta2",
    "final_sync_fraction",
)  # fmt: skip
PENALTY_SETTINGS = (
    "anomaly_threshold", "anomaly_alpha", "anomaly_warmup_syncs", "anomaly_patience",
    "loss_threshold", "clip", "weight_temperature",
)  # fmt: skip
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], ())
_FIELDS = {spec.name: spec for spec in dataclasses.fields(Settings)}


class Values(dict[str, Any]):
    """Values by name; None for a name without a value.

    Names are those of Megatron's arguments, those of the settings with the prefix `edit_`, and
    paths in Megatron-Bridge's configuration: `dist.lazy_mpu_init`, and `.ft` at its top.
    """

    @classmethod
    def of(cls, settings: Settings, **others: Any) -> Values:
        """Return the values of all settings, and others."""
        found = {attribute(name): getattr(settings, name) for name in _FIELDS}
        return cls(found, open_settings=settings.open_settings, **others)

    def __missing__(self, name: str) -> None:
        return None


@dataclass(frozen=True)
class Part:
    """One of the two parts of a refused combination.

    Attributes:
        names: of the values that an error shows, separated by spaces.
        words: what the table in the documentation shows.
        holds: whether given values have this part.
    """

    names: str
    words: str
    holds: Callable[[Values], bool]

    def shown(self, values: Values) -> str:
        """Return the flags of the names with their values."""
        return " and ".join(_shown(name, values[name]) for name in self.names.split())


@dataclass(frozen=True)
class Refusal:
    """A row of the table.

    Attributes:
        given: what the error shows as the value.
        other: what it cannot be used with.
        rule: the reason, in which `{name}` is replaced by a value.
        remedy: what to do, in the same form.
        joint: between both parts, where the error shows both; None: it shows `given` alone.
    """

    given: Part
    other: Part
    rule: str
    remedy: str
    joint: str | None = None

    def holds(self, values: Values) -> bool:
        """Whether values have both parts."""
        return self.given.holds(values) and self.other.holds(values)


class CombinationError(UsageError):
    """A combination of the table was given."""

    def __init__(self, refusal: Refusal, values: Values) -> None:
        self.refusal = refusal
        shown = refusal.given.shown(values)
        if refusal.joint is not None:
            shown += refusal.joint + refusal.other.shown(values)
        super().__init__(shown, refusal.rule.format_map(values), refusal.remedy.format_map(values))


def refuse(rows: Iterable[Refusal], values: Values) -> None:
    """Check values against rows of the table.

    Raises:
        CombinationError: they have the parts of a row; of several, the first.
    """
    for row in rows:
        if row.holds(values):
            raise CombinationError(row, values)


# ---- parts of combinations


def _shown(name: str, value: object) -> str:
    option = name.strip(".") if "." in name else flag_of(name)
    if value is None or value is False:
        return f"no {option}"
    return option if value is True else f"{option} {format_value(value)}"


def is_(name: str, *accepted: object) -> Part:
    """A value is one of these."""
    words = f"`{_shown(name, accepted[0])}`".replace("`no ", "no `")
    if len(accepted) > 1:
        words = f"`{_shown(name, True)}` {', '.join(map(format_value, accepted))}"
    return Part(name, words, lambda values: values[name] in accepted)


def is_not(name: str, *accepted: object) -> Part:
    """A value is none of these; shown with those that may be given."""
    others = [format_value(value) for value in accepted if value not in (None, False)]
    words = f"`{_shown(name, True)}`" + (f" other than {', '.join(others)}" if others else "")
    return Part(name, words, lambda values: values[name] not in accepted)


def given(name: str) -> Part:
    """A value is given, and neither 0 nor empty."""
    return Part(name, f"`{_shown(name, True)}`", lambda values: values[name] not in _EMPTY)


def missing(name: str) -> Part:
    """No value is given."""
    return Part(name, f"no `{_shown(name, True)}`", lambda values: values[name] in _EMPTY)


def unusual(name: str) -> Part:
    """A setting differs from its default, or from the preset of the strategy."""

    def holds(values: Values) -> bool:
        # No setting that is refused has a preset for an inner optimizer (tested).
        usual = preset_of(_FIELDS[name], values["edit_strategy"], ADAM)
        return bool(values[attribute(name)] != usual)

    return Part(attribute(name), f"`{flag(name)}`", holds)


def strategies(property_: str, *, value: bool = True) -> Part:
    """A strategy has (or has not) a property of `Strategy`."""
    names = [name for name, each in STRATEGIES.items() if getattr(each, property_)]
    return (is_ if value else is_not)("edit_strategy", *names)


USES_EDIT = Part("use_edit", "`--use-edit`", lambda values: True)
TIMED, COUNTED = strategies("is_timed"), strategies("is_timed", value=False)
ENDLESS = strategies("endless_warmup")
LANDS_LATER = strategies("lands_at_next_meeting")
HUB, NO_HUB = given("edit_hub"), missing("edit_hub")
AUTO_ON, CHECKED = given("edit_auto"), given("edit_check_commits")
HAS_MUON = is_("optimizer", MUON)
LAYER_WISE = Part(
    "optimizer use_distributed_optimizer",
    "`--optimizer muon --use-distributed-optimizer`",
    lambda values: values["optimizer"] == MUON and bool(values["use_distributed_optimizer"]),
)
UNSHARDED_MUON = Part(
    "optimizer",
    "`--optimizer muon` without `--use-distributed-optimizer`",
    lambda values: values["optimizer"] == MUON and not values["use_distributed_optimizer"],
)
NO_AVERAGED_GRADIENTS = Part(
    "edit_warmup_steps edit_final_sync_fraction",
    "neither a warm-up nor a final phase",
    lambda values: (
        not STRATEGIES[values["edit_strategy"]].endless_warmup
        and values["edit_warmup_steps"] == 0
        and not values["edit_final_sync_fraction"]
    ),
)
SHORT_WARMUP = Part(
    "edit_warmup_steps",
    f"`{flag('warmup_steps')}` below {AUTO_WARMUP_STEPS}",
    lambda values: (
        values["edit_warmup_steps"] is not None and values["edit_warmup_steps"] < AUTO_WARMUP_STEPS
    ),
)
WITHOUT_MOMENTS = Part(
    "edit_average_moments",
    f"`{flag('average_moments')} {NONE}`",
    lambda values: (
        values["edit_average_moments"] == NONE
        and "average_moments" not in (values["open_settings"] or ())
    ),
)
NOTHING_OPEN = Part("", "all that it chooses", lambda values: not values["open_settings"])


def _at_least(name: str, bound: str, difference: int = 0) -> Part:
    def holds(values: Values) -> bool:
        return bool(values[bound] is not None and values[name] + difference >= values[bound])

    sign = ">" if difference < 0 else ">="
    return Part(f"{name} {bound}", f"`{flag_of(name)}` {sign} `{flag_of(bound)}`", holds)


# ---- the settings of EDiT, in the order in which they are checked

_DROP, _OTHER_STRATEGY = "drop the flag", "drop the flag, or use another strategy"
_NO_EFFECT = "has no effect with --edit-strategy {edit_strategy}"
_USE_EDIT = f"use --edit-strategy {DEFAULT_STRATEGY}, or drop the flag"
_TOGETHER = "cannot be used together: "
_NOT_ELASTIC = "is not elastic yet: --edit-hub cannot be given with it"


def _without_effect(part: Part, without: Part, needed: str) -> Refusal:
    rule = f"has no effect without {needed}"
    return Refusal(part, without, rule, f"add {needed}, or drop the flag")


def _fixed(name: str, strategy: str) -> Refusal:
    value = preset_of(_FIELDS[name], strategy, ADAM)
    rule = f"is always {value} with --edit-strategy {strategy}"
    return Refusal(unusual(name), is_("edit_strategy", strategy), rule, _OTHER_STRATEGY)


def _own(name: str) -> Refusal:
    owners = [other for other, each in STRATEGIES.items() if name in each.own_settings]
    remedy = f"use --edit-strategy {owners[0]}, or drop the flag"
    return Refusal(unusual(name), is_not("edit_strategy", *owners), _NO_EFFECT, remedy)


_TOP64_OWNERS = [n for n, each in STRATEGIES.items() if each.presets.get("sync_dtype") == TOP64]
_OWN_SETTINGS = dict.fromkeys(name for each in STRATEGIES.values() for name in each.own_settings)

STRATEGY_ROWS = (
    Refusal(is_not("edit_preset", NONE), is_not("edit_strategy", *AUTO_STRATEGIES), _NO_EFFECT,
            _USE_EDIT),
    *(_fixed(name, each.name) for each in STRATEGIES.values() for name in each.fixed_settings),
    Refusal(is_("edit_sync_dtype", TOP64), is_not("edit_strategy", *_TOP64_OWNERS),
            f"is part of --edit-strategy {' and '.join(_TOP64_OWNERS)}",
            f"use --edit-strategy {_TOP64_OWNERS[0]}, or another --edit-sync-dtype"),
    *(_own(name) for name in _OWN_SETTINGS),
    *(Refusal(unusual(name), TIMED, _NO_EFFECT, _USE_EDIT) for name in STEP_COUNT_SETTINGS),
    *(Refusal(unusual(name), strategies("has_penalty", value=False), _NO_EFFECT, _USE_EDIT)
      for name in PENALTY_SETTINGS),
    *(Refusal(unusual(name), ENDLESS, _NO_EFFECT, _USE_EDIT) for name in SYNC_SETTINGS),
    Refusal(is_not("edit_sync_dtype", FP32), ENDLESS, f"{_NO_EFFECT}: it has no syncs",
            "drop the flag; --edit-warmup-dtype is about gradients"),
)  # fmt: skip

LANDING_ROWS = (
    Refusal(_at_least("edit_delay_steps", "edit_sync_interval"), COUNTED,
            "must be d < tau", "give a smaller value, or a longer --edit-sync-interval"),
    Refusal(_at_least("edit_fragments", "edit_sync_interval", -1), COUNTED,
            "must be F <= tau", "give a smaller value, or a longer --edit-sync-interval"),
    *(Refusal(given(name), LANDS_LATER,
              "--edit-strategy {edit_strategy} always lands one round later, without a mix",
              _OTHER_STRATEGY)
      for name in ("edit_delay_steps", "edit_mix")),
    *(Refusal(is_not("edit_inner_state", ALL), part,
              "with fragments, a delay or a mix there is no step at which replicas are equal",
              f"use --edit-inner-state {ALL}")
      for part in (is_not("edit_fragments", 1), given("edit_delay_steps"), given("edit_mix"),
                   LANDS_LATER)),
    *(Refusal(CHECKED, part,
              "results can only be checked before they are applied where a sync lands at once",
              "drop the flag, or the delay, the mix or the strategy that lands later")
      for part in (given("edit_delay_steps"), given("edit_mix"), LANDS_LATER)),
    Refusal(CHECKED, is_("edit_sync_mode", OVERLAP),
            "results can only be checked before they are applied in blocking mode",
            "drop --edit-sync-mode, or --edit-check-commits", joint=", "),
)  # fmt: skip

SCHEDULE_ROWS = (
    _without_effect(is_not("edit_warmup_dtype", FP32), NO_AVERAGED_GRADIENTS,
                    "--edit-warmup-steps or --edit-final-sync-fraction > 0"),
    Refusal(is_not("edit_average_moments_every", 1), WITHOUT_MOMENTS,
            "no moments are averaged", "add --edit-average-moments both (or second), or drop the "
            "flag"),
    Refusal(is_("edit_interval", QSR), missing("edit_qsr_a"), "the qsr schedule needs a",
            "add --edit-qsr-a, or use another --edit-interval", joint=", "),
    Refusal(given("edit_qsr_a"), is_not("edit_interval", QSR),
            "is a of the qsr schedule, and other schedules do not take it",
            "add --edit-interval qsr, or drop the flag"),
    _without_effect(unusual("stl_stages"), is_not("edit_interval", STL), f"--edit-interval {STL}"),
    Refusal(given("edit_delay_steps"), is_("edit_interval", ADACOMM),
            f"the rounds of --edit-interval {ADACOMM} may become shorter than the delay",
            "use --edit-delay-steps 0, or another --edit-interval"),
    Refusal(is_not("edit_fragments", 1), is_not("edit_interval", FIXED),
            "the rounds of --edit-interval {edit_interval} change their length",
            "use --edit-fragments 1, or --edit-interval fixed"),
)  # fmt: skip

AUTO_ROWS = (
    _without_effect(unusual("auto_share"), missing("edit_auto"), flag("auto")),
    *(Refusal(AUTO_ON, part, _TOGETHER + reason, "drop one of the two", joint=", ")
      for part, reason in (
          (is_not("edit_strategy", *AUTO_STRATEGIES),
           "its tables of expected losses are those of EDiT"),
          (is_not("edit_interval", FIXED), "it chooses a fixed interval"),
          (is_not("edit_preset", NONE), "nothing is chosen with a preset"),
          (given("edit_settings"), "the file has all settings"))),
    Refusal(AUTO_ON, SHORT_WARMUP, f"measures in at least {AUTO_WARMUP_STEPS} steps of the warm-up",
            f"give --edit-warmup-steps {AUTO_WARMUP_STEPS} or more, or drop --edit-auto",
            joint=", "),
    Refusal(AUTO_ON, NOTHING_OPEN, "everything that it chooses is given",
            f"drop it, or one of {', '.join(map(flag, AUTO_SETTINGS))}"),
)  # fmt: skip

_SINGLE_LAUNCH = "or drop the flag for a single launch of all replicas"
LAUNCH_ROWS = (
    Refusal(given("edit_rendezvous"), is_("edit_replica_id", None),
            "one launch per replica also needs --edit-replica-id",
            f"add --edit-replica-id, {_SINGLE_LAUNCH}"),
    *(Refusal(is_not("edit_replica_id", None), is_(name, None),
              f"one launch per replica also needs {flag_of(name)}",
              f"add {flag_of(name)}, {_SINGLE_LAUNCH}")
      for name in ("edit_rendezvous", "edit_num_replicas")),
    Refusal(is_not("edit_replica_id", None),
            _at_least("edit_replica_id", "edit_num_replicas"),
            "must be below --edit-num-replicas {edit_num_replicas}",
            "number the launches from 0"),
    *(Refusal(unusual("placement"), part,
              "arranges the ranks of a single launch, and here each replica has its own", _DROP)
      for part in (is_not("edit_replica_id", None), HUB)),
    _without_effect(unusual("sync_net"), is_("edit_sync_backend", GLOO),
                    f"--edit-sync-backend nccl or {AUTO}"),
)  # fmt: skip

HUB_ROWS = (
    *(_without_effect(unusual(name), NO_HUB, "--edit-hub HOST:PORT")
      for name in ("replica_name", "nominal_replicas", "min_replicas", "hub_token_file")),
    *(Refusal(HUB, is_(name, None), f"also needs {flag_of(name)}", f"add {flag_of(name)}")
      for name in ("edit_replica_name", "edit_nominal_replicas")),
    Refusal(is_not("edit_num_replicas", None), HUB,
            "with a hub each replica has a launch of its own, and the hub numbers them",
            "start one launch per replica, with --edit-replica-name, and drop the flag"),
    Refusal(_at_least("edit_min_replicas", "edit_nominal_replicas", -1), HUB,
            "must be at most --edit-nominal-replicas {edit_nominal_replicas}",
            "give a smaller value"),
    Refusal(strategies("is_elastic", value=False), HUB, _NOT_ELASTIC,
            f"use {' or '.join(n for n, each in STRATEGIES.items() if each.is_elastic)}, or drop "
            "--edit-hub"),
    # Settings of which a run with a hub takes these values only.
    *(Refusal(is_not(attribute(name), *values), HUB, _NOT_ELASTIC,
              f"use {' or '.join(map(format_value, values))}, or drop --edit-hub")
      for name, values in (
          ("sync_mode", (AUTO, BLOCKING)),
          ("sync_backend", (AUTO, GLOO)),
          ("sync_net", (AUTO,)),
          ("interval", (FIXED,)))),
    Refusal(is_not("edit_warmup_dtype", FP32), HUB,
            "with a hub gradients are not averaged: the warm-up and the final phase consist of "
            "rounds of one step, in --edit-sync-dtype", _DROP),
)  # fmt: skip

OPTIMIZER_ROWS = tuple(
    Refusal(part, is_not("optimizer", *OPTIMIZERS_WITH_MOMENTS),
            "--optimizer {optimizer} has no such moments", "use --optimizer adam, or drop the flag")
    for part in (is_not("edit_average_moments", NONE), given("edit_scale_beta2"))
)  # fmt: skip

SETTINGS_ROWS = (
    *STRATEGY_ROWS, *LANDING_ROWS, *SCHEDULE_ROWS, *AUTO_ROWS, *LAUNCH_ROWS, *HUB_ROWS,
    *OPTIMIZER_ROWS,
)  # fmt: skip


# ---- Megatron's arguments


def _with(other: Part, rows: Iterable[tuple[str, object, str, str]]) -> tuple[Refusal, ...]:
    """Return rows for arguments with a value; None: any but None, False, 0 and empty."""
    return tuple(
        Refusal(given(name) if value is None else is_(name, value), other, rule, remedy)
        for name, value, rule, remedy in rows
    )


_LATER = "is not supported together with --use-edit yet"
_BUFFERS, _ADD_SET = "keeps its own parameter buffers", "use the distributed optimizer"
_BATCH = "changes what a step consumes"
MEGATRON_ROWS = (
    *_with(USES_EDIT, (
        ("use_megatron_fsdp", True, _BUFFERS, _ADD_SET),
        ("use_torch_fsdp2", True, _BUFFERS, _ADD_SET),
        ("main_params_dtype", "fp16", "cannot hold the result of a sync",
         "use --main-params-dtype fp32"),
        ("overlap_param_gather_with_optimizer_step", True, "gathers parameters before a sync",
         _DROP),
        ("optimizer_cuda_graph", True, "fixes the optimizer step before a sync is known", _DROP),
        ("reuse_grad_buf_for_mxfp8_param_ag", True, "gathers parameters from the gradient buffer",
         _DROP),
        ("fp4_param_gather", True, _LATER, _DROP),
        ("moe_expert_rank_capacity_factor", None, "can repeat a step on one replica alone",
         "use --moe-expert-capacity-factor"),
        ("qk_clip", True, "changes weights after a sync, on each replica by itself", _DROP),
        ("hybrid_context_parallel", True, _LATER, _DROP),
        ("ddp_param_name_patterns_for_fp32_local_accumulation", None,
         "keeps gradients where the warm-up does not average them", _DROP),
        ("error_injection_rate", None, "makes one replica repeat steps", _DROP),
        ("rerun_mode", "report_determinism_stats", "repeats steps on one replica alone", _DROP),
        ("skip_train", True, "leaves nothing to synchronise", "evaluate without --use-edit"),
        ("adlr_autoresume", True, "could end the replicas at different steps", _DROP),
        ("use_layer_wise_distributed_optimizer", True, "is what Megatron makes of other flags",
         "use --optimizer muon --use-distributed-optimizer"),
        ("non_persistent_save_interval", None, _LATER, "use --save-interval"),
        ("moe_use_upcycling", True, _LATER,
         "upcycle without --use-edit, then load what it saved"),
        ("ckpt_convert_format", None, _LATER, "convert without --use-edit"),
        *((f"save_{what}_interval", None, "would let all replicas write to one file", _DROP)
          for what in ("params", "activations", "tokens_per_expert", "wgrads", "dgrads")),
        ("override_ckpt_iteration", None, "ignores the data ledger", _DROP),
        ("dataloader_save", None, _LATER, _DROP),
        ("inprocess_restart", True, _LATER, _DROP),
        ("perform_rl_step", True, _LATER, _DROP),
        ("yaml_cfg", None, _LATER, "give the settings as flags"),
        ("check_weight_hash_across_dp_replicas_interval", None,
         "compares ranks of one replica only", "use --edit-digest-interval"),
        ("dataloader_type", "external", "does not share the samples out among the replicas",
         "use --dataloader-type single or cyclic"),
        ("optimizer", "dist_muon",
         f"with --use-edit it must be one of {', '.join(SUPPORTED_OPTIMIZERS)}",
         "use --optimizer muon --use-distributed-optimizer"),
    )),
    Refusal(is_not("optimizer", *SUPPORTED_OPTIMIZERS), USES_EDIT,
            f"with --use-edit it must be one of {', '.join(SUPPORTED_OPTIMIZERS)}",
            "use --optimizer adam"),
    Refusal(is_("optimizer", "sgd"),
            Part("use_distributed_optimizer", "`--use-distributed-optimizer`",
                 lambda values: bool(values["use_distributed_optimizer"]
                                     or values["overlap_param_gather"])),
            "Megatron's distributed optimizer does not take it",
            "drop --use-distributed-optimizer and --overlap-param-gather"),
    Refusal(is_not("ckpt_format", "torch_dist"), given("save"),
            "with --use-edit checkpoints are saved in the format torch_dist", _DROP),
    # Assumes equal steps, or another order of samples.
    *(row for other in (TIMED, HUB) for row in _with(other, (
        ("rampup_batch_size", None, _BATCH, "use a fixed batch size"),
        ("step_batch_size_schedule", None, _BATCH, "use a fixed batch size"),
        ("decrease_batch_size_if_needed", True, _BATCH, _DROP),
        ("iterations_to_skip", None, "skips samples of one replica alone", _DROP),
        ("phase_transition_iterations", None, "is counted in one replica's steps", _DROP),
        ("dataloader_type", "cyclic", "does not allow blocks to be assigned",
         "use --dataloader-type single"),
    ))),
    Refusal(given("wandb_project"), missing("wandb_exp_name"), "needs a name of the run",
            "add --wandb-exp-name NAME"),
    Refusal(given("edit_log_units_to_tensorboard"),
            Part("", "neither `--tensorboard-dir` nor `--wandb-project`",
                 lambda values: not (values["tensorboard_dir"] or values["wandb_project"])),
            "needs a writer of Megatron's", "add --tensorboard-dir DIR (or --wandb-project NAME)"),
    Refusal(given("fp8_param_gather"), is_not("fp8_recipe", None, *FP8_GATHER_RECIPES), _LATER,
            "use --fp8-recipe delayed, tensorwise or blockwise", joint=" with "),
    Refusal(given("fp8_param_gather"),
            Part("use_precision_aware_optimizer fp8_recipe",
                 "`--use-precision-aware-optimizer --fp8-recipe delayed`",
                 lambda values: bool(values["use_precision_aware_optimizer"])
                 and values["fp8_recipe"] == "delayed"),
            "Adam's own kernel then writes the parameters, from main shards that only it can read",
            "use --fp8-recipe tensorwise, or drop one of the first two flags", joint=" with "),
)  # fmt: skip

_SYNC_OVERLAP = is_("edit_sync_mode", OVERLAP)
MUON_ROWS = tuple(
    Refusal(part, other, rule, remedy, joint=" with ")
    for part, other, rule, remedy in (
        (given("fp16"), HAS_MUON, "Megatron's Muon does not train in fp16", "use --bf16"),
        (is_("muon_scalar_optimizer", "lion"), HAS_MUON, _LATER,
         "use --muon-scalar-optimizer adam"),
        (given("use_precision_aware_optimizer"), HAS_MUON,
         "keeps no main parameters that Muon could step", _DROP),
        (given("optimizer_cpu_offload"), HAS_MUON, "steps parameters with its own Adam", _DROP),
        (_SYNC_OVERLAP, UNSHARDED_MUON,
         "every rank steps all matrices, so that Megatron gathers none in the forward pass",
         "add --use-distributed-optimizer, or use --edit-sync-mode auto"),
        (missing("bf16"), LAYER_WISE,
         "Megatron's layer-wise distributed optimizer trains in bf16 only",
         "add --bf16, or drop --use-distributed-optimizer"),
        (Part("num_distributed_optimizer_instances", "`--num-distributed-optimizer-instances` > 1",
              lambda values: (values["num_distributed_optimizer_instances"] or 1) > 1), LAYER_WISE,
         "Megatron's layer-wise distributed optimizer supports one instance only", _DROP),
    )
)  # fmt: skip

# `full_iteration_graph` is whether a CUDA graph of the whole iteration is requested.
OVERLAP_ROWS = (
    Refusal(_SYNC_OVERLAP,
            Part("", "a CUDA graph of a whole iteration",
                 lambda values: bool(values["full_iteration_graph"])),
            "a full-iteration CUDA graph fixes the gathers",
            "use another scope of CUDA graphs, or use auto"),
    Refusal(_SYNC_OVERLAP, missing("overlap_param_gather"),
            "units can only land where Megatron gathers parameters in the forward pass",
            "add --overlap-param-gather (and --overlap-grad-reduce), or use auto"),
)  # fmt: skip


# ---- Megatron-Bridge's configuration

_BRIDGE = Part("", "Megatron-Bridge", lambda values: True)
_LATER_IN_BRIDGE = "is not supported with EDiT in Megatron-Bridge yet"
_DROP_SETTING = "drop the setting"
BRIDGE_ROWS = (
    Refusal(HUB, _BRIDGE, _LATER_IN_BRIDGE, "use a fixed set of replicas"),
    Refusal(TIMED, _BRIDGE, _LATER_IN_BRIDGE, "use edit"),
    Refusal(is_not("optimizer", ADAM), _BRIDGE, _LATER_IN_BRIDGE, "use adam"),
    Refusal(is_not("dataset.dataloader_type", "single", "cyclic"), _BRIDGE,
            "its samples cannot be shared out among the replicas", "use single or cyclic"),
    *_with(_BRIDGE, ((path, None, rule, remedy) for path, rule, remedy in (
        ("dist.use_megatron_fsdp", _BUFFERS, _ADD_SET),
        ("dist.use_decentralized_pg", _LATER_IN_BRIDGE, _DROP_SETTING),
        ("dist.lazy_mpu_init", _LATER_IN_BRIDGE, _DROP_SETTING),
        ("dist.eval_context_parallel_size", _LATER_IN_BRIDGE, _DROP_SETTING),
        ("train.exit_signal_handler", "would stop one replica alone", _DROP_SETTING),
        ("train.exit_duration_in_mins", "could stop the replicas at different steps",
         "set train.train_iters"),
        ("train.iterations_to_skip", "counts the samples of one replica only", _DROP_SETTING),
        ("train.num_epochs", "cannot be combined with callbacks", "set train.train_iters"),
        ("train.rampup_batch_size", _LATER_IN_BRIDGE, _DROP_SETTING),
        ("train.decrease_batch_size_if_needed", _LATER_IN_BRIDGE, _DROP_SETTING),
        ("train.check_weight_hash_across_dp_replicas_interval",
         "compares ranks of one replica only", "set optimizer.digest_interval"),
        ("rng.data_parallel_random_init", "would make the replicas differ from the start",
         _DROP_SETTING),
        ("checkpoint.async_save", _LATER_IN_BRIDGE, _DROP_SETTING),
        ("checkpoint.non_persistent_save_interval", _LATER_IN_BRIDGE,
         "set checkpoint.save_interval"),
        (".ft", _LATER_IN_BRIDGE, _DROP_SETTING),
        (".nvrx_straggler", "could stop one replica alone", _DROP_SETTING),
        (".inprocess_restart", _LATER_IN_BRIDGE, _DROP_SETTING),
        (".straggler", _LATER_IN_BRIDGE, _DROP_SETTING),
        (".peft", _LATER_IN_BRIDGE, "train all parameters"),
    ))),
)  # fmt: skip

# The whole table, by what has the values.
TABLE = {
    "settings of EDiT": SETTINGS_ROWS,
    "Megatron-LM": (*MEGATRON_ROWS, *MUON_ROWS, *OVERLAP_ROWS),
    "Megatron-Bridge": BRIDGE_ROWS,
}
