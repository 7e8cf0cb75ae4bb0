"""Parts of benchmarks/convergence.py."""
