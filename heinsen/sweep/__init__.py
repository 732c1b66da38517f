"""Many runs of train.py from one command.

space       values and ranges, and the points made of them
definition  the definition of a sweep, and the strategies that choose its points
runs        one run, and what is known of it
folder      sweep.json, the runs' folders, sweep.csv
job         one run as a process
machine     the cores and GPUs of this machine
slurm       SLURM's queue
launch      launchers: this machine or SLURM
search      which run comes next
drive       the loop that keeps a sweep going
display     the table of the runs
curves      the logs of runs, as curves and final figures
effects     what the results say about each field
figures     the figures of the report
report      the HTML page

Nothing here knows the fields of a config except `seed`: values are text on the way in and out, and the entry point
checks them.
"""
