"""Replica worlds: placement of ranks, communication groups, and the messages between replicas."""
