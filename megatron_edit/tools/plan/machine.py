"""Cost model of exchanges: the link between hosts, and the local work of a rank in a sync.

The coefficients of `CPU` were fitted to runs on two cores without a GPU. Those of a sync to
benchmarks/results/growth_2cpu_202611.md, over a link without a limit, least of 32: 2.92 ns for
every byte that a ring sends, and 1.25 ms a unit at N = 2, where a ring has two steps. Of the 2.92
ns, 1.2 are attributed to gloo: the cost per byte of stock Megatron's step over a link without a
limit (overlap_2cpu_202611.md). That its gathers take 1.6 times as long as their bytes is from the
run at 20 Mbit/s. All other runs are predictions (docs/plan.md). The coefficients of `GPU` are
estimates from the bytes that the arithmetic moves, and were not measured.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The link between two hosts.

    Attributes:
        bandwidth: bits per second of a host in each direction.
        latency: seconds until a message has arrived.
        burst_seconds: length of the burst, in seconds at `bandwidth`, that a shaped link (a token
            bucket) sends at once after it was idle; 0 for a link without shaping.
    """

    bandwidth: float
    latency: float = 0.0
    burst_seconds: float = 0.0

    def seconds(self, nbytes: float) -> float:
        """Return the seconds to transfer some bytes, without the latency."""
        return 8 * nbytes / self.bandwidth


@dataclass(frozen=True)
class Machine:
    """Costs of a rank's local work, and properties of its communication library.

    Attributes:
        per_element: seconds for every element of a rank's shard: norm, addend, outer step, copies.
        per_sent_byte: seconds for every byte that a ring of fp32 would send.
        per_ring_step: seconds for every step of the ring of every unit.
        copy_bandwidth: bytes per second between host memory and device, for offload.
        reduces_by_all_reduce: whether a reduce-scatter sends what an all-reduce does (gloo).
        per_wire_byte: least seconds of a rank to send a byte, on any link.
        gather_factor: seconds of a gather over those that its bytes need.
        memory_share: usable share of the device's memory.
    """

    name: str
    per_element: float
    per_sent_byte: float
    per_ring_step: float
    copy_bandwidth: float
    reduces_by_all_reduce: bool
    per_wire_byte: float = 0.0
    gather_factor: float = 1.0
    memory_share: float = 0.9


CPU = Machine("cpu", 0.0, 1.72e-9, 0.625e-3, 5e9, True, 1.2e-9, 1.6)
# About 20 passes over 4 bytes an element at 1.5 TB/s, and a dozen kernel launches a unit.
GPU = Machine("gpu", 80 / 1.5e12, 0.0, 20e-6, 20e9, False)
MACHINES = {machine.name: machine for machine in (CPU, GPU)}
