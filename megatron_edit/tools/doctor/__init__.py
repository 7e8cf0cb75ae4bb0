"""What there is on a machine and between the machines of a launch (megatron-edit doctor)."""
