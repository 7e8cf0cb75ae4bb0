"""Parts of benchmarks/overlap.py: kinds of training, their runs, analysis and report."""
