"""Tools beside training: the command line, comparison, planner, diagnosis, monitor, patch."""
