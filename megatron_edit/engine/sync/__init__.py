"""Syncs: outer state, the sync of each unit, syncs under way, landing, checks and reports."""
