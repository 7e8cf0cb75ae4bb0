"""Parts of benchmarks/gains.py: kinds of training, their runs, analysis and picture."""
