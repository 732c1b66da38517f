"""How the output of sigmoid attention scales with the number of keys (run.py)."""
