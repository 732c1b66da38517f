"""How the output of sigmoid attention scales with the number of keys (scripts/sigmoid_scaling.py runs it)."""
