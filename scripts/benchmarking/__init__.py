"""The benchmarks of scripts/benchmark.py, one module each, and the running and reporting of scripts/on_device.py."""
