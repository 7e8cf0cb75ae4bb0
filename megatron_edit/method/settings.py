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
    kind: Any = None,
    only: Iterable[Any] | None = None,
    within: str | None = None,
) -> Any:
    """Return a dataclass field with the metadata of its flag.

    Args:
        default: value if the flag is not given.
        doc: help text, with unit.
        kind: converter of the flag's text; None for a switch.
        only: supported values, if there are few; any other is refused.
        within: interval of a number, like ``(0, 1]``.
    """
    only = None if only is None else tuple(only)
    metadata = {"doc": doc, "kind": kind, "only": only, "within": within}
    if kind is number_or_none:
        metadata["none"] = NONE
    return field(default=default, metadata=metadata)


def _preset(usual: Any, doc: str, **options: Any) -> Any:
    """Return a field that strategies may preset: its default None is replaced by the preset.

    Args:
        usual: value for strategies without a preset.
        doc: see `_setting`.
        options: see `_setting`.
    """
    made = _setting(None, doc, **options)
    return field(default=None, metadata={**made.metadata, "usual": usual})


@dataclass(frozen=True)
class Settings:
    """The settings, with the metadata of their flags; `config.EditConfig` are those of a run.

    Attributes:
        open_settings: what `--edit-auto` chooses: settings that were not given. No field of the
            dataclass: `replace` gives all settings.
    """

    open_settings: ClassVar[tuple[str, ...]] = ()

    @property
    def averaged_fraction(self) -> float:
        """Share of the training, at its end, in which gradients are averaged at every step: with a
        hub none, as its final phase consists of rounds of one step."""
        return self.final_sync_fraction if self.hub is None else 0.0

    use_edit: bool = _setting(False, "train with EDiT replicas")
    num_replicas: int | None = _setting(
        None,
        "N, number of replicas; if not set: nodes of the launch, if more than 1",
        kind=int,
        within=_COUNT,
    )
    placement: str = _setting(
        BY_HOSTS,
        "which ranks of a single launch make a replica: hosts (a replica spans several hosts only "
        "where it must; hosts in natural order: node2 before node10), ranks (consecutive ranks of "
        "the launch), or a file with a line per replica: the names of its hosts. Lines [NAME] in "
        "it begin the replicas of a site",
        kind=str,
    )
    replica_id: int | None = _setting(
        None,
        "index of this launch's replica, 0..N-1 (one launch per replica)",
        kind=int,
        within="[0, 65535]",
    )
    rendezvous: str | None = _setting(
        None,
        "HOST:PORT at which replica 0 listens for the others (one launch per replica)",
        kind=str,
    )
    hub: str | None = _setting(
        None,
        "HOST:PORT of the hub (megatron-edit hub) that decides which replicas take part: they may "
        "fail, leave, return and join while the others train (one launch per replica)",
        kind=str,
    )
    replica_name: str | None = _setting(
        None, "name of this launch's replica, unique in the run (with a hub)", kind=str
    )
    nominal_replicas: int | None = _setting(
        None,
        "N0, replicas that the run begins with, and that the global batch is divided by (with a "
        "hub)",
        kind=int,
        within=_COUNT,
    )
    min_replicas: int = _setting(
        1, "fewest replicas that sync, as given to the hub (with a hub)", kind=int, within=_COUNT
    )
    hub_token_file: str | None = _setting(
        None, "file with the secret that hub and replicas share (else EDIT_HUB_TOKEN)", kind=str
    )
    strategy: str = _setting(
        DEFAULT_STRATEGY, "how replicas are synchronised", kind=str, only=STRATEGIES
    )
    preset: str = _setting(
        NONE,
        "defaults of another origin; paper: the constants of the EDiT paper, nothing is chosen",
        kind=str,
        only=(NONE, PAPER),
    )
    settings: str | None = _setting(
        None,
        "run.json of an earlier run: repeat the settings that it used, also those that it chose",
        kind=str,
    )
    warmup_steps: int = _preset(
        None,
        "W, synchronous steps before the first local step, or auto: "
        f"{WARMUP_SHARE:.0%} of the training, at least {AUTO_WARMUP_STEPS} where it is long enough",
        kind=count_or_auto,
        within=_STEPS_FROM_0,
    )
    auto: bool = _setting(
        False,
        "choose tau (a-edit: tau_time), wire type, fragments, delay, outer settings, averaged "
        "moments and final phase during the warm-up, from the measured speed of the links and of "
        "the steps: the least expected loss at which syncs cost little time. Flags that are given "
        "stay. On by itself where no flag of these is given (--edit-strategy edit, a-edit)",
    )
    auto_share: float = _setting(
        0.97,
        "with --edit-auto: predicted speed, as a share of that without syncs, which the choice "
        "must reach if possible",
        kind=float,
        within="(0, 1)",
    )
    sync_interval: int = _preset(128, "tau, inner steps between two syncs", kind=int, within=_STEPS)
    final_sync_fraction: float = _preset(
        0.0,
        "X, last fraction of training (of iterations, or of samples with --train-samples) in which "
        "gradients are averaged at every step, as in the warm-up (with a hub: the parameters after "
        "it)",
        kind=float,
        within=_SHARE,
    )
    warmup_dtype: str = _preset(
        FP32,
        "data type in which gradients are averaged over the replicas in the warm-up and in the "
        "final phase; fp32: in Megatron's own type of gradients; int8 with --edit-auto",
        kind=str,
        only=WARMUP_DTYPES,
    )
    sync_seconds: float = _preset(
        600.0, "a-edit: tau_time, seconds between two syncs", kind=float, within=_SECONDS
    )
    min_round_steps: int = _setting(
        100,
        "a-edit: minimum steps of a round, of all replicas together",
        kind=int,
        within=_STEPS_FROM_0,
    )
    step_weight: float = _setting(
        0.0, "a-edit: rho, influence of step counts on the weights", kind=float, within=_SHARE
    )
    outer_lr: float = _preset(
        USUAL_LR,
        "nu, outer learning rate (slowmo, co2: alpha). For edit and a-edit it depends on the "
        "interval and the wire type (docs/strategies.md)",
        kind=float,
        within="(0, 1000]",
    )
    outer_momentum: float = _preset(
        USUAL_MOMENTUM,
        "mu_o, outer Nesterov momentum (slowmo, co2: beta). For edit and a-edit it "
        "depends on the interval and the wire type (docs/strategies.md)",
        kind=float,
        within="[0, 1)",
    )
    anomaly_threshold: float = _setting(
        3.0,
        "delta, standard deviations above the mean norm that are allowed",
        kind=float,
        within=_POSITIVE,
    )
    anomaly_alpha: float = _setting(
        0.02, "alpha, weight of the newest norm in the statistics", kind=float, within="(0, 1]"
    )
    anomaly_warmup_syncs: int = _setting(
        20, "accepted syncs before a detector is armed", kind=int, within=_SYNCS_FROM_0
    )
    anomaly_patience: int = _setting(
        3,
        "consecutive rejections before a norm or a loss is accepted again",
        kind=int,
        within=_SYNCS_FROM_0,
    )
    loss_threshold: float = _setting(
        6.0,
        "standard deviations by which a replica's loss of a round, relative to the other replicas, "
        "may exceed its history",
        kind=float,
        within=_POSITIVE,
    )
    clip: float = _setting(
        10.0, "phi, largest norm of a unit's averaged update", kind=float, within=_POSITIVE
    )
    weight_temperature: float | None = _setting(
        None, "T of the weights softmax(-norm / T), or auto", kind=number_or_auto, within=_POSITIVE
    )
    no_anomaly: bool = _setting(
        False,
        "disable anomaly elimination, including the loss check (non-finite norms are still "
        "rejected)",
    )
    no_loss_check: bool = _setting(False, "do not reject replicas because of their loss")
    no_weighting: bool = _setting(False, "give all accepted replicas equal weights")
    no_clip: bool = _setting(False, "disable the clip")
    sync_mode: str = _setting(
        AUTO,
        "when updates are exchanged; blocking: right after the step, overlap: in the forward pass",
        kind=str,
        only=(AUTO, *SYNC_MODES),
    )
    prefetch_units: int = _setting(
        2,
        "units whose exchange is prepared ahead (gloo sends one at a time)",
        kind=int,
        within=_COUNT,
    )
    fragments: int = _preset(
        1, "F, groups of units synced at staggered steps", kind=int, within=_COUNT
    )
    delay_steps: int = _preset(
        0,
        "d, steps between the start of a sync and its landing; < tau (a-edit: it lands at "
        "the next meeting at the latest)",
        kind=int,
        within=_STEPS_FROM_0,
    )
    mix: float = _preset(
        0.0, "weight of the local parameters when a sync lands", kind=float, within=_SHARE
    )
    offload: bool = _setting(False, "keep anchor and outer momentum in (pinned) host memory")
    sync_dtype: str = _preset(
        FP32, "data type in which updates are exchanged", kind=str, only=WIRE_TYPES
    )
    sync_backend: str = _setting(
        AUTO,
        "backend for updates between replicas; auto uses nccl if every rank has its own GPU, else "
        "gloo",
        kind=str,
        only=(AUTO, *SYNC_BACKENDS),
    )
    sync_net: str = _setting(
        AUTO,
        "NCCL's network between replicas: Socket (TCP), IB, or the name of a plugin. auto leaves "
        "it to NCCL, but uses Socket where there are InfiniBand or RoCE adapters and the replicas "
        "are on different sites (--edit-placement FILE), or are launches that no known subnet of "
        "these adapters joins. NCCL_NET in the environment overrides it",
        kind=str,
    )
    digest_interval: int = _setting(
        10, "syncs of a unit between two drift checks", kind=int, within=_SYNCS
    )
    check_commits: bool = _setting(
        False,
        "compare the replicas' results of a sync before any replica applies it, so that a "
        "difference ends the run with the state before the round; implies --edit-sync-mode "
        "blocking, and needs memory for one more fp32 copy of the shards (and of averaged moments "
        "and residuals) during a sync",
    )
    log_dir: str | None = _setting(None, "folder for the event files", kind=str)
    log_units_to_tensorboard: bool = _setting(
        False,
        f"also write scalars of each unit, and of each replica if more than {FEW_REPLICAS}",
    )
    telemetry: bool = _setting(
        False,
        "send OpenTelemetry metrics and spans over OTLP, as the variables OTEL_... say (extra "
        "metrics); if Megatron's own telemetry is on they join it without this flag",
    )
    metrics_port: int | None = _setting(
        None,
        "port at which Prometheus scrapes replica 0; replica r uses this port + r (extra metrics)",
        kind=int,
        within="[1, 65535]",
    )
    mlflow_experiment: str | None = _setting(
        None,
        "experiment of MLflow to which scalars are written, as the variables MLFLOW_... say (extra "
        "mlflow)",
        kind=str,
    )
    inner_state: str = _setting(
        ALL,
        "whose inner optimizer state is saved; all: that of every replica (exact resume), leader: "
        "that of replica 0 (saves wait for a sync), reset: like leader, moments restart at zero",
        kind=str,
        only=INNER_STATES,
    )
    timeout_seconds: float | None = _setting(
        None,
        "seconds without progress after which a replica counts as lost, or auto = "
        f"max({MIN_TIMEOUT_SECONDS:g}, {TIMEOUT_ROUNDS} x the last round, "
        f"{TIMEOUT_ROUNDS} x the time of its bytes)",
        kind=number_or_auto,
        within=_SECONDS,
    )
    interval: str = _setting(
        FIXED,
        "schedule of the sync interval; qsr = max(tau, (a / lr)^2), stl: tau doubles in each of "
        "the equal stages of local training, adacomm = ceil(tau sqrt(loss / first loss)). In "
        "measurements with a fixed outer momentum, growing and shrinking intervals gave a worse "
        "loss than a fixed one at equal traffic (docs/strategies.md)",
        kind=str,
        only=INTERVALS,
    )
    qsr_a: float | None = _setting(
        None,
        "a of the qsr schedule, in units of the learning rate",
        kind=number_or_none,
        within=_POSITIVE,
    )
    stl_stages: int = _setting(
        3,
        "stl: number of equal stages of local training, tau doubles in each",
        kind=int,
        within="[1, 64]",
    )
    average_moments: str = _preset(
        NONE,
        "moments of Adam that a sync averages over the replicas, in one byte per element",
        kind=str,
        only=AVERAGED_MOMENTS,
    )
    average_moments_every: int = _preset(
        1, "K, syncs between two averages of moments", kind=int, within=_SYNCS
    )
    scale_beta2: bool = _setting(
        False,
        "use beta2^(1/N) as Adam's beta2 during local training; on with --edit-auto",
    )
    co2_gap: float = _setting(
        1.0, "co2: Lambda, divisor of the average", kind=float, within=_POSITIVE
    )
    co2_clip: float | None = _setting(
        None, "co2: phi_m, largest element of the momentum", kind=number_or_none, within=_POSITIVE
    )
    device: str = _setting(
        AUTO,
        "device; auto uses CUDA, and the CPU only if the machine has no GPU",
        kind=str,
        only=(AUTO, *DEVICES),
    )
