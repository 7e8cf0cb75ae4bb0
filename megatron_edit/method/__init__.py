"""The mathematics of EDiT: functions of tensors, without process groups or host.

Tables are float64 of shape [N, U]: N replicas by U sync units, in forward order. All functions
are deterministic, so that ranks with the same table reach the same decisions.
"""
