"""Parts of benchmarks/gpu_check.py: what is run, how it is run, the numbers, and their report."""
