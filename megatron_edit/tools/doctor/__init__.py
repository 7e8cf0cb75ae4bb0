"""Checks of a machine and of the links between the replicas of a launch (megatron-edit doctor)."""
