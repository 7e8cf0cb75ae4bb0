"""Names, defaults and help texts of all settings; `config` has the rules for them.

Every other module uses the settings as they are here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from megatron_edit.constants import (
    ALL,
    AUTO,
    AUTO_WARMUP_STEPS,
    AVERAGED_MOMENTS,
    BY_HOSTS,
    DEFAULT_STRATEGY,
    DEVICES,
    FEW_REPLICAS,
    FIXED,
    FP32,
    INNER_STATES,
    INTERVALS,
    MAX_TIMEOUT_SECONDS,
    MIN_TIMEOUT_SECONDS,
    NONE,
    PAPER,
    SYNC_BACKENDS,
    SYNC_MODES,
    TIMEOUT_ROUNDS,
    WARMUP_DTYPES,
    WARMUP_SHARE,
    WIRE_TYPES,
)
from megatron_edit.method.strategy import STRATEGIES, USUAL_LR, USUAL_MOMENTUM

# Intervals of numbers. Steps: also numbers that no training reaches; seconds: what timers take.
_COUNT, _STEPS, _STEPS_FROM_0 = "[1, 65536]", "[1, 1e20]", "[0, 1e20]"
_SYNCS, _SYNCS_FROM_0 = "[1, 1000000000]", "[0, 1000000000]"
_POSITIVE, _SHARE = "(0, 1e12]", "[0, 1]"
_SECONDS = f"(0, {MAX_TIMEOUT_SECONDS:.0f}]"
# Titles of the groups of flags, in the order of help texts and docs/flags.md.
GROUPS = {
    "launch": "replicas and launch",
    "rounds": "rounds",
    "sent": "what is sent",
    "outer": "outer optimizer and penalty",
    "landing": "overlap and delay",
    "elastic": "elastic runs",
    "logs": "logs and metrics",
    "safety": "checkpoints, checks and time-outs",
    "others": "other strategies",
}


# argparse shows the names of these functions: "invalid number_or_auto value: 'x'".
def number_or_auto(text: str) -> float | None:
    """Parse a number or `auto` (None)."""
    return None if text == AUTO else float(text)


def count_or_auto(text: str) -> int | None:
    """Parse a whole number or `auto` (None)."""
    return None if text == AUTO else int(text)


def number_or_none(text: str) -> float | None:
    """Parse a number or `none` (None)."""
    return None if text == NONE else float(text)


def is_within(value: float, interval: str) -> bool:
    """Whether a number is in an interval like ``(0, 1]``; NaN is in none."""
    least, most = map(float, interval[1:-1].split(","))
    is_above = value >= least if interval[0] == "[" else value > least
    return is_above and (value <= most if interval[-1] == "]" else value < most)


def in_words(interval: str) -> str:
    """Describe an interval like ``(0, 1]``."""
    least, most = interval[1:-1].split(", ")
    from_text = f"at least {least}" if interval[0] == "[" else f"above {least}"
    return f"{from_text} and {'at most' if interval[-1] == ']' else 'below'} {most}"


def _setting(
    default: Any,
    doc: str,
    *,
    group: str,
    is_common: bool = False,
    kind: Any = None,
    only: Iterable[Any] | None = None,
    within: str | None = None,
) -> Any:
    """Return a dataclass field with the metadata of its flag.

    Args:
        default: value if the flag is not given.
        doc: help text, with unit.
        group: name of the flag's group, in `GROUPS`.
        is_common: whether the help of a launch lists the flag; `megatron-edit flags` lists all.
        kind: converter of the flag's text; None for a switch.
        only: supported values, if there are few; any other is refused.
        within: interval of a number, like ``(0, 1]``.
    """
    return field(
        default=default,
        metadata={
            "doc": doc,
            "group": group,
            "is_common": is_common,
            "kind": kind,
            "only": None if only is None else tuple(only),
            "within": within,
            "none": NONE if kind is number_or_none else None,
        },
    )


def _preset(usual: Any, doc: str, **options: Any) -> Any:
    """Return a field that strategies may preset: its default None is replaced by the preset.

    Args:
        usual: value for strategies without a preset.
        doc: see `_setting`.
        options: see `_setting`.
    """
    metadata = _setting(None, doc, **options).metadata
    return field(default=None, metadata={**metadata, "usual": usual})


@dataclass(frozen=True)
class Settings:
    """The settings, with the metadata of their flags; `config.EditConfig` are those of a run.

    Attributes:
        open_settings: what `--edit-auto` chooses: settings that were not given. No field of the
            dataclass: `replace` gives all settings.
        has_open_warmup: whether W was not given, and is a share of the training; no field either.
    """

    open_settings: ClassVar[tuple[str, ...]] = ()
    has_open_warmup: ClassVar[bool] = False

    @property
    def averaged_fraction(self) -> float:
        """Share of the training, at its end, in which gradients are averaged at every step: with a
        hub none, as its final phase consists of rounds of one step."""
        return self.final_sync_fraction if self.hub is None else 0.0

    use_edit: bool = _setting(
        False,
        "train with EDiT replicas; alone it chooses the settings in the warm-up (--edit-auto)",
        group="launch",
        is_common=True,
    )
    num_replicas: int | None = _setting(
        None,
        "N, number of replicas; if not set: nodes of the launch, if more than 1",
        kind=int,
        within=_COUNT,
        group="launch",
        is_common=True,
    )
    placement: str = _setting(
        BY_HOSTS,
        "which ranks of a single launch make a replica: hosts (a replica spans several hosts only "
        "where it must; hosts in natural order: node2 before node10), ranks (consecutive ranks of "
        "the launch), or a file with a line per replica: the names of its hosts. Lines [NAME] in "
        "it begin the replicas of a site",
        kind=str,
        group="launch",
    )
    replica_id: int | None = _setting(
        None,
        "index of this launch's replica, 0..N-1 (one launch per replica)",
        kind=int,
        within="[0, 65535]",
        group="launch",
        is_common=True,
    )
    rendezvous: str | None = _setting(
        None,
        "HOST:PORT at which replica 0 listens for the others (one launch per replica)",
        kind=str,
        group="launch",
        is_common=True,
    )
    hub: str | None = _setting(
        None,
        "HOST:PORT of the hub (megatron-edit hub) that decides which replicas take part: they may "
        "fail, leave, return and join while the others train (one launch per replica)",
        kind=str,
        group="elastic",
        is_common=True,
    )
    replica_name: str | None = _setting(
        None,
        "name of this launch's replica, unique in the run (with a hub)",
        kind=str,
        group="elastic",
    )
    nominal_replicas: int | None = _setting(
        None,
        "N0, replicas that the run begins with, and that the global batch is divided by (with a "
        "hub)",
        kind=int,
        within=_COUNT,
        group="elastic",
    )
    min_replicas: int = _setting(
        1,
        "fewest replicas that sync, as given to the hub (with a hub)",
        kind=int,
        within=_COUNT,
        group="elastic",
    )
    hub_token_file: str | None = _setting(
        None,
        "file with the secret that hub and replicas share (else EDIT_HUB_TOKEN)",
        kind=str,
        group="elastic",
    )
    strategy: str = _setting(
        DEFAULT_STRATEGY,
        "how replicas are synchronised",
        kind=str,
        only=STRATEGIES,
        group="rounds",
        is_common=True,
    )
    preset: str = _setting(
        NONE,
        "defaults of another origin; paper: the constants of the EDiT paper, nothing is chosen",
        kind=str,
        only=(NONE, PAPER),
        group="rounds",
        is_common=True,
    )
    settings: str | None = _setting(
        None,
        "run.json of an earlier run: repeat the settings that it used, also those that it chose",
        kind=str,
        group="rounds",
        is_common=True,
    )
    warmup_steps: int = _preset(
        None,
        "W, synchronous steps before the first local step, or auto: "
        f"{WARMUP_SHARE:.0%} of the training, at least {AUTO_WARMUP_STEPS} where it is long enough",
        kind=count_or_auto,
        within=_STEPS_FROM_0,
        group="rounds",
        is_common=True,
    )
    auto: bool = _setting(
        False,
        "choose tau (a-edit: tau_time), wire type, fragments, delay, outer settings, averaged "
        "moments and final phase during the warm-up, from the measured speed of the links and of "
        "the steps: the least expected loss at which syncs cost little time. Flags that are given "
        "stay. On by itself where no flag of these is given (--edit-strategy edit, a-edit)",
        group="rounds",
        is_common=True,
    )
    auto_share: float = _setting(
        0.97,
        "with --edit-auto: predicted speed, as a share of that without syncs, which the choice "
        "must reach if possible",
        kind=float,
        within="(0, 1)",
        group="rounds",
    )
    sync_interval: int = _preset(
        128,
        "tau, inner steps between two syncs",
        kind=int,
        within=_STEPS,
        group="rounds",
        is_common=True,
    )
    final_sync_fraction: float = _preset(
        0.0,
        "X, last fraction of training (of iterations, or of samples with --train-samples) in which "
        "gradients are averaged at every step, as in the warm-up (with a hub: the parameters after "
        "it)",
        kind=float,
        within=_SHARE,
        group="rounds",
        is_common=True,
    )
    warmup_dtype: str = _preset(
        FP32,
        "data type in which gradients are averaged over the replicas in the warm-up and in the "
        "final phase; fp32: in Megatron's own type of gradients; int8 with --edit-auto",
        kind=str,
        only=WARMUP_DTYPES,
        group="sent",
    )
    sync_seconds: float = _preset(
        600.0,
        "a-edit: tau_time, seconds between two syncs",
        kind=float,
        within=_SECONDS,
        group="rounds",
        is_common=True,
    )
    min_round_steps: int = _setting(
        100,
        "a-edit: minimum steps of a round, of all replicas together",
        kind=int,
        within=_STEPS_FROM_0,
        group="rounds",
    )
    step_weight: float = _setting(
        0.0,
        "a-edit: rho, influence of step counts on the weights",
        kind=float,
        within=_SHARE,
        group="outer",
    )
    outer_lr: float = _preset(
        USUAL_LR,
        "nu, outer learning rate (slowmo, co2: alpha). For edit and a-edit it depends on the "
        "interval and the wire type (docs/strategies.md)",
        kind=float,
        within="(0, 1000]",
        group="outer",
    )
    outer_momentum: float = _preset(
        USUAL_MOMENTUM,
        "mu_o, outer Nesterov momentum (slowmo, co2: beta). For edit and a-edit it "
        "depends on the interval and the wire type (docs/strategies.md)",
        kind=float,
        within="[0, 1)",
        group="outer",
    )
    anomaly_threshold: float = _setting(
        3.0,
        "delta, standard deviations above the mean norm that are allowed",
        kind=float,
        within=_POSITIVE,
        group="outer",
    )
    anomaly_alpha: float = _setting(
        0.02,
        "alpha, weight of the newest norm in the statistics",
        kind=float,
        within="(0, 1]",
        group="outer",
    )
    anomaly_warmup_syncs: int = _setting(
        20,
        "accepted syncs before a detector is armed",
        kind=int,
        within=_SYNCS_FROM_0,
        group="outer",
    )
    anomaly_patience: int = _setting(
        3,
        "consecutive rejections before a norm or a loss is accepted again",
        kind=int,
        within=_SYNCS_FROM_0,
        group="outer",
    )
    loss_threshold: float = _setting(
        6.0,
        "standard deviations by which a replica's loss of a round, relative to the other replicas, "
        "may exceed its history",
        kind=float,
        within=_POSITIVE,
        group="outer",
    )
    clip: float = _setting(
        10.0,
        "phi, largest norm of a unit's averaged update",
        kind=float,
        within=_POSITIVE,
        group="outer",
    )
    weight_temperature: float | None = _setting(
        None,
        "T of the weights softmax(-norm / T), or auto",
        kind=number_or_auto,
        within=_POSITIVE,
        group="outer",
    )
    no_anomaly: bool = _setting(
        False,
        "disable anomaly elimination, including the loss check (non-finite norms are still "
        "rejected)",
        group="outer",
    )
    no_loss_check: bool = _setting(
        False, "do not reject replicas because of their loss", group="outer"
    )
    no_weighting: bool = _setting(False, "give all accepted replicas equal weights", group="outer")
    no_clip: bool = _setting(False, "disable the clip", group="outer")
    sync_mode: str = _setting(
        AUTO,
        "when updates are exchanged; blocking: right after the step, overlap: in the forward pass",
        kind=str,
        only=(AUTO, *SYNC_MODES),
        group="landing",
    )
    prefetch_units: int = _setting(
        2,
        "units whose exchange is prepared ahead (gloo sends one at a time)",
        kind=int,
        within=_COUNT,
        group="landing",
    )
    fragments: int = _preset(
        1, "F, groups of units synced at staggered steps", kind=int, within=_COUNT, group="landing"
    )
    delay_steps: int = _preset(
        0,
        "d, steps between the start of a sync and its landing; < tau (a-edit: it lands at "
        "the next meeting at the latest)",
        kind=int,
        within=_STEPS_FROM_0,
        group="landing",
        is_common=True,
    )
    mix: float = _preset(
        0.0,
        "weight of the local parameters when a sync lands",
        kind=float,
        within=_SHARE,
        group="landing",
    )
    offload: bool = _setting(
        False, "keep anchor and outer momentum in (pinned) host memory", group="outer"
    )
    sync_dtype: str = _preset(
        FP32,
        "data type in which updates are exchanged",
        kind=str,
        only=WIRE_TYPES,
        group="sent",
        is_common=True,
    )
    sync_backend: str = _setting(
        AUTO,
        "backend for updates between replicas; auto uses nccl if every rank has its own GPU, else "
        "gloo",
        kind=str,
        only=(AUTO, *SYNC_BACKENDS),
        group="sent",
    )
    sync_net: str = _setting(
        AUTO,
        "NCCL's network between replicas: Socket (TCP), IB, or the name of a plugin. auto leaves "
        "it to NCCL, but uses Socket where there are InfiniBand or RoCE adapters and the replicas "
        "are on different sites (--edit-placement FILE), or are launches that no known subnet of "
        "these adapters joins. NCCL_NET in the environment overrides it",
        kind=str,
        group="sent",
    )
    digest_interval: int = _setting(
        10, "syncs of a unit between two drift checks", kind=int, within=_SYNCS, group="safety"
    )
    check_commits: bool = _setting(
        False,
        "compare the replicas' results of a sync before any replica applies it, so that a "
        "difference ends the run with the state before the round; implies --edit-sync-mode "
        "blocking, and needs memory for one more fp32 copy of the shards (and of averaged moments "
        "and residuals) during a sync",
        group="safety",
    )
    log_dir: str | None = _setting(
        None, "folder for the event files", kind=str, group="logs", is_common=True
    )
    log_units_to_tensorboard: bool = _setting(
        False,
        f"also write scalars of each unit, and of each replica if more than {FEW_REPLICAS}",
        group="logs",
    )
    telemetry: bool = _setting(
        False,
        "send OpenTelemetry metrics and spans over OTLP, as the variables OTEL_... say (extra "
        "metrics); if Megatron's own telemetry is on they join it without this flag",
        group="logs",
    )
    metrics_port: int | None = _setting(
        None,
        "port at which Prometheus scrapes replica 0; replica r uses this port + r (extra metrics)",
        kind=int,
        within="[1, 65535]",
        group="logs",
    )
    mlflow_experiment: str | None = _setting(
        None,
        "experiment of MLflow to which scalars are written, as the variables MLFLOW_... say (extra "
        "mlflow)",
        kind=str,
        group="logs",
    )
    inner_state: str = _setting(
        ALL,
        "whose inner optimizer state is saved; all: that of every replica (exact resume), leader: "
        "that of replica 0 (saves wait for a sync), reset: like leader, moments restart at zero",
        kind=str,
        only=INNER_STATES,
        group="safety",
    )
    timeout_seconds: float | None = _setting(
        None,
        "seconds without progress after which a replica counts as lost, or auto = "
        f"max({MIN_TIMEOUT_SECONDS:g}, {TIMEOUT_ROUNDS} x the last round, "
        f"{TIMEOUT_ROUNDS} x the time of its bytes)",
        kind=number_or_auto,
        within=_SECONDS,
        group="safety",
        is_common=True,
    )
    interval: str = _setting(
        FIXED,
        "schedule of the sync interval; qsr = max(tau, (a / lr)^2), stl: tau doubles in each of "
        "the equal stages of local training, adacomm = ceil(tau sqrt(loss / first loss)). In "
        "measurements with a fixed outer momentum, growing and shrinking intervals gave a worse "
        "loss than a fixed one at equal traffic (docs/strategies.md)",
        kind=str,
        only=INTERVALS,
        group="rounds",
    )
    qsr_a: float | None = _setting(
        None,
        "a of the qsr schedule, in units of the learning rate",
        kind=number_or_none,
        within=_POSITIVE,
        group="rounds",
    )
    stl_stages: int = _setting(
        3,
        "stl: number of equal stages of local training, tau doubles in each",
        kind=int,
        within="[1, 64]",
        group="rounds",
    )
    average_moments: str = _preset(
        NONE,
        "moments of Adam that a sync averages over the replicas, in one byte per element",
        kind=str,
        only=AVERAGED_MOMENTS,
        group="sent",
    )
    average_moments_every: int = _preset(
        1, "K, syncs between two averages of moments", kind=int, within=_SYNCS, group="sent"
    )
    scale_beta2: bool = _setting(
        False,
        "use beta2^(1/N) as Adam's beta2 during local training; on with --edit-auto",
        group="rounds",
    )
    co2_gap: float = _setting(
        1.0, "co2: Lambda, divisor of the average", kind=float, within=_POSITIVE, group="others"
    )
    co2_clip: float | None = _setting(
        None,
        "co2: phi_m, largest element of the momentum",
        kind=number_or_none,
        within=_POSITIVE,
        group="others",
    )
    device: str = _setting(
        AUTO,
        "device; auto uses CUDA, and the CPU only if the machine has no GPU",
        kind=str,
        only=(AUTO, *DEVICES),
        group="launch",
    )
