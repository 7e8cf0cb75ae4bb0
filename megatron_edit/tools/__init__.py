"""Around training: the command line, comparison, planning, diagnosis, watching, patching."""
