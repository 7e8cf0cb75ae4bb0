"""Parts of benchmarks/gpu_check.py: cases, their runs, analysis and report."""
