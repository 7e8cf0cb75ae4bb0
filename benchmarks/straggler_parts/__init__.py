"""Parts of benchmarks/stragglers.py: kinds of training, their runs, analysis and report."""
