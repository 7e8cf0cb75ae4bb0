"""Parts of benchmarks/checkpoints.py: kinds of training, their runs, analysis and report."""
