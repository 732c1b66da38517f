"""Many runs of train.py from one command.

space       values and ranges, and the names of points
definition  the definition of a sweep, and the strategies that choose its points
runs        one run, its state and latest values; the table of all runs
folder      sweep.json, the runs' folders, sweep.csv
job         one run as a process, on this machine or on a node of a cluster
launch      launchers: this machine, whose cores and GPUs the runs share, or SLURM
search      which run comes next
drive       the loop that starts the runs and watches them
report      the HTML page: effects, curves, a table

Nothing here knows the fields of a config except `seed`: values are text on the way in and out, and the entry point
checks them.
"""
