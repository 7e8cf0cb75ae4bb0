"""Choices and numbers that more than one part of the package goes by, each written once.

It imports nothing: settings can be read without torch, and the engine without settings.
"""

from __future__ import annotations

# What settings can be; `EditConfig` says what each of them means, and which is the default.
SYNC_BACKENDS = ("nccl", "gloo")
FP32, BF16, INT8, INT4 = SYNC_DTYPES = ("fp32", "bf16", "int8", "int4")
OVERLAP, BLOCKING = SYNC_MODES = ("overlap", "blocking")
FIXED, QSR, STL, ADACOMM = INTERVALS = ("fixed", "qsr", "stl", "adacomm")
NONE, MOMENTS_SECOND, MOMENTS_BOTH = AVERAGED_MOMENTS = ("none", "second", "both")
CPU, CUDA = DEVICES = ("cpu", "cuda")
ALL, LEADER, RESET = INNER_STATES = ("all", "leader", "reset")
CHECKPOINT_FORMS = (ALL, LEADER)  # inner state of every replica, or of replica 0 alone

# Seconds: nobody is given up sooner, unless the user says so (`--edit-timeout-seconds auto`),
# nor sooner than after so many times the last round.
LEAST_TIMEOUT_SECONDS = 600.0
TIMEOUT_ROUNDS = 4
GRACE_SECONDS = 5.0  # a rank that ends with an error lets the first rank speak before
FEW_REPLICAS = 8  # so many have scalars of their own without being asked for
# Weights near one-hot, or a clip that always binds: so many syncs before it is worth a warning,
# and the factor of the clip below which it counts.
WATCHED_SYNCS = 10
LOW_CLIP = 0.5

FIRST_MOMENT, SECOND_MOMENT = "first", "second"  # of the inner optimizer
EMBEDDING, LAYER, FINAL, MTP = "embedding", "layer", "final", "mtp"  # kinds of sync units
SYNC_TIMES = ("wait", "exchange", "outer", "exposed", "total")  # of a sync, in event files
ADAM, SGD, MUON = SUPPORTED_OPTIMIZERS = ("adam", "sgd", "muon")  # of Megatron's
OPTIMIZERS_WITH_MOMENTS = (ADAM, MUON)  # muon: adam for what is no matrix, a momentum for matrices
FP32_BYTES = 4
# Why a replica was left out of a unit, in event files: the norm of its pseudo-gradient is not
# finite, the loss check, the detector of norms, no step since the last sync.
NON_FINITE, BAD_LOSS, OUTLYING_NORM, NO_STEP = ("non-finite", "loss", "norm", "no-step")
