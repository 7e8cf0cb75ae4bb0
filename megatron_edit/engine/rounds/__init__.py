"""Rounds: when replicas meet, exchange of records, and joint work outside of syncs."""
