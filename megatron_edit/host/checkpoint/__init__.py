"""Checkpoints of replicas, through Megatron's own: what is saved, by whom, and how it is loaded."""
