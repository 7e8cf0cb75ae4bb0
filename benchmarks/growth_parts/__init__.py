"""Parts of benchmarks/growth.py: its cases, how they are run, the fits, and their report."""
