"""Parts of benchmarks/checkpoints.py: what is run, how it is run, the numbers, and their report."""
