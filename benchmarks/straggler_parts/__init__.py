"""Parts of benchmarks/stragglers.py: what is run, how it is run, the numbers, and their report."""
