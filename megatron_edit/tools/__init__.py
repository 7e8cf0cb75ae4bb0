"""Tools around training: the command line, comparison, planner, diagnosis, monitor, patch."""
