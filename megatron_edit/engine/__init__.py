"""The engine: plans, states and syncs of one rank. Knows its host only by a protocol."""
