"""Published reference values for DiLoCo and Streaming DiLoCo.

* torchft (BSD-3), test_fixtures/torchft.diloco_regression_test.*: two equal replicas, two fragments
  of one parameter each, H = 6, inner SGD of rate 1 with the constant gradient 2, outer SGD of rate
  2, start 1.0. Keys are (delay, weight of the local parameters); values are the two fragments
  after 0, 1, ... 15 steps. A fragment lands every 3 steps, fragment 0 first.
* MaxText (Apache-2.0), tests/integration/diloco_test.py: a linear model under mean squared error,
  inner SGD of rate 0.1, H = 3, outer Nesterov of rate 1 and momentum 0.9.

The numbers follow from arithmetic; no code was taken.
"""

import numpy as np

from tests.reference.oracle import Array
from tests.reference.schedules import ExplicitSchedule

LOCAL = [1.0 - 2.0 * k for k in range(16)]

TORCHFT: dict[tuple[int, float], tuple[list[float], list[float]]] = {
    (0, 0.0): (
        [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59],
        [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53],
    ),
    (0, 0.5): (
        [1, -1, -3, -8, -10, -12, -14, -16, -18, -24.5, -26.5, -28.5, -30.5, -32.5, -34.5, -40.25],
        [1, -1, -3, -5, -7, -9, -17, -19, -21, -23, -25, -27, -32, -34, -36, -38],
    ),
    (0, 1.0): (LOCAL, LOCAL),
    (1, 0.0): (
        [1, -1, -3, -7, -9, -11, -13, -15, -17, -27, -29, -31, -33, -35, -37, -47],
        [1, -1, -3, -5, -7, -9, -19, -21, -23, -25, -27, -29, -39, -41, -43, -45],
    ),
    (1, 0.5): (
        [1, -1, -3, -6, -8, -10, -12, -14, -16, -21.5, -23.5, -25.5, -27.5, -29.5, -31.5, -35.75],
        [1, -1, -3, -5, -7, -9, -15, -17, -19, -21, -23, -25, -29, -31, -33, -35],
    ),
    (1, 1.0): (LOCAL, LOCAL),
}

# Anchors with mix 1.0, where they do not affect the parameters:
# (delay, fragment) -> {after step: anchor}.
TORCHFT_ANCHORS = {
    (0, 0): {3: -11.0, 9: -23.0},
    (0, 1): {6: -23.0, 12: -23.0},
    (1, 0): {3: -7.0, 9: -23.0},
    (1, 1): {6: -19.0, 12: -23.0},
}

MAXTEXT_START = {"w": np.array([2.0, 1.0]), "b": np.array([1.0])}
MAXTEXT_INPUTS = [np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[1.0, 0.0], [0.0, 1.0]])]
MAXTEXT_LABELS = [np.array([1.0, 2.0]), np.array([2.0, 3.0])]
# Losses of replicas 0 and 1 before every step; the fourth pair is after the sync.
MAXTEXT_LOSSES = [(1.0, 1.0), (0.49, 0.81), (0.2401, 0.6561), (0.207544, 0.940944)]
MAXTEXT_SYNCED = {"w": np.array([1.5345, 1.0494]), "b": np.array([0.5839])}
MAXTEXT_RATE = 0.1


def torchft_schedule(delay: int) -> ExplicitSchedule:
    """Return starts after steps 3k - d, k = 1 ... 5, of fragments 0 and 1 alternately."""
    return ExplicitSchedule({3 * k - delay: [(k - 1) % 2] for k in range(1, 6)}, delay)


def maxtext_gradients(replica: int, w: Array, b: Array) -> tuple[float, dict[str, Array]]:
    """Return the mean squared error of the linear model on the data of `replica`, and gradients."""
    inputs, labels = MAXTEXT_INPUTS[replica], MAXTEXT_LABELS[replica]
    residual = inputs @ w + b - labels
    slope = 2.0 * residual / len(labels)
    return float(np.mean(residual**2)), {"w": inputs.T @ slope, "b": np.array([slope.sum()])}


# torchft's fixture test_diloco_mocked_failure_recovery_0: two replicas, two layers of one parameter
# each, both 1.0 at the start. A step subtracts 2. Each layer is synced every 6 steps, layer 0 first
# after step 3, layer 1 after step 6; outer SGD of rate 2. Replica 1 ends after step 6, and is
# started again while replica 0 waits for it at step 9.
RECOVERY_SYNCS = ((3, 9, 15, 21), (6, 12, 18))  # of each layer
# Parameters of replica 0 after 0, 1, ... 21 steps, by layer.
RECOVERY_FIRST = (
    [1, -1, -3, -11, -13, -15, -17, -19, -21, -35, -37, -39, -41, -43, -45, -59, -61, -63, -65, -67,
     -69, -83],
    [1, -1, -3, -5, -7, -9, -23, -25, -27, -29, -31, -33, -47, -49, -51, -53, -55, -57, -71, -73,
     -75, -77],
)  # fmt: skip
# Parameters of replica 1 after 0, 1, ... 15 steps of its second start.
RECOVERY_SECOND = (
    [1, -1, -3, -35, -37, -39, -41, -43, -45, -59, -61, -63, -65, -67, -69, -83],
    [1, -1, -3, -29, -31, -33, -47, -49, -51, -53, -55, -57, -71, -73, -75, -77],
)
# Anchor of each layer after steps of replica 0.
RECOVERY_ANCHORS = ({3: -11, 9: -35, 15: -59}, {6: -23, 12: -47, 18: -71})
