"""The mathematics of EDiT: tensors in, tensors out, no process groups, no host.

Tables are float64 of shape [N, U]: N replicas by U sync units, in forward order. All functions
are deterministic, so that ranks that hold the same table reach the same decisions.
"""
