"""One exchange: units, their shards and outer state, the unit and the sync in flight, the queue."""
