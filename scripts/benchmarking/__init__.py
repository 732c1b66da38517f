"""The benchmarks of scripts/benchmark.py: attention (with its contestants and report), step, decode."""
