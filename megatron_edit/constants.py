"""Constants that several parts of the package use.

This module imports nothing, so that settings can be read without torch and the engine can be
imported without settings.
"""

from __future__ import annotations

# Allowed values of settings; `Settings` describes them and has the defaults.
AUTO = "auto"
NCCL, GLOO = SYNC_BACKENDS = ("nccl", "gloo")
SYNC_DTYPES = ("fp32", "bf16", "int8", "int4", "int2", "ternary", "sign")  # by falling size
FP32, BF16, INT8, INT4, INT2, TERNARY, SIGN = SYNC_DTYPES
WARMUP_DTYPES = (FP32, BF16, INT8)
TOP64 = "top64"  # of the strategy sparse-loco alone
WIRE_TYPES = (*SYNC_DTYPES, TOP64)
OVERLAP, BLOCKING = SYNC_MODES = ("overlap", "blocking")
DEFAULT_STRATEGY = "edit"  # the default of --edit-strategy
AUTO_STRATEGIES = (DEFAULT_STRATEGY, "a-edit")  # for which --edit-auto chooses settings
PAPER = "paper"  # of --edit-preset
FIXED, QSR, STL, ADACOMM = INTERVALS = ("fixed", "qsr", "stl", "adacomm")
NONE, MOMENTS_SECOND, MOMENTS_BOTH = AVERAGED_MOMENTS = ("none", "second", "both")
CPU, CUDA = DEVICES = ("cpu", "cuda")
BY_HOSTS, BY_RANKS = "hosts", "ranks"  # of --edit-placement, which also takes a file
ALL, LEADER, RESET = INNER_STATES = ("all", "leader", "reset")
CHECKPOINT_FORMS = (ALL, LEADER)  # inner state of every replica, or of replica 0 alone

# Without --edit-warmup-steps the warm-up is this share of the training. Settings are chosen in
# warm-ups of so many steps or more, which may be at most the other share of a short training.
WARMUP_SHARE = 0.1
AUTO_WARMUP_STEPS = 20
MEASURED_STEPS = 10  # at the end of the warm-up
LONGEST_WARMUP_SHARE = 0.25

# With `--edit-timeout-seconds auto` a replica counts as lost after the larger of these seconds and
# this multiple of the duration of the last round.
MIN_TIMEOUT_SECONDS = 600.0
MAX_TIMEOUT_SECONDS = 1e8  # three years; timers of torch and gloo overflow at about a hundred times
TIMEOUT_ROUNDS = 4
GRACE_SECONDS = 5.0  # a failing rank waits for the first rank to report the error
REPLICA_NAME = r"[A-Za-z0-9._-]{1,64}"  # pattern of the name of a replica, in a run with a hub
REPLICA_NAME_RULE = "1 to 64 letters, digits, dots, underscores and hyphens"
FEW_REPLICAS = 8  # up to this number each replica has its own scalars by default
# Warn after so many syncs in a row with weights near one-hot, or with a clip factor below LOW_CLIP.
WATCHED_SYNCS = 10
LOW_CLIP = 0.5

FIRST_MOMENT, SECOND_MOMENT = "first", "second"  # moments of the inner optimizer
EMBEDDING, LAYER, FINAL, MTP = "embedding", "layer", "final", "mtp"  # kinds of sync units
# Durations of a sync in event files: the first three add up to the exposed time.
SYNC_TIMES = ("wait", "exchange", "outer", "exposed", "total")
ADAM, SGD, MUON = SUPPORTED_OPTIMIZERS = ("adam", "sgd", "muon")  # values of Megatron's --optimizer
FP8_GATHER_RECIPES = ("delayed", "tensorwise", "blockwise")  # accepted with --fp8-param-gather
OPTIMIZERS_WITH_MOMENTS = (ADAM, MUON)  # muon: momentum for matrices, adam for the rest
FP32_BYTES = 4
# Reasons in event files for excluding a replica from a unit: non-finite norm of the
# pseudo-gradient, loss check, norm detector, no step since the last sync.
NON_FINITE, BAD_LOSS, OUTLYING_NORM, NO_STEP = ("non-finite", "loss", "norm", "no-step")

COMPACT_JSON = (",", ":")  # separators of JSON texts without spaces
# Seconds without an answer of the other machine, before and between probes, and their number: after
# 30 s it is taken for gone.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
