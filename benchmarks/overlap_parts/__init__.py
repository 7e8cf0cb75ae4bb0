"""Parts of benchmarks/overlap.py: what is run, how it is run, the numbers, and their report."""
