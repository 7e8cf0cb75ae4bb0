"""Checkpoints of replicas, built on Megatron's own: saving, committing and loading."""
