"""Parts of benchmarks/growth.py: cases, their runs, fits and report."""
