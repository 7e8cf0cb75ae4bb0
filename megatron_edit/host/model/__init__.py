"""One replica's model, optimizer, schedules and loop counters, as the engine's host."""
