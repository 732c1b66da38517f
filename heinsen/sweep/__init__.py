"""Many runs of train.py from one command: what to try, where it lies, who runs it, what came of it.

space (values and ranges), folder (sweep.json, states, table), job (one run as a process), launch (local, SLURM),
search (which run next), curves (what runs have logged), report (the HTML page). Nothing here knows a config's fields
but `seed`: values come and go as text, and the entry point checks them.
"""
