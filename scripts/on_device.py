"""Measure everything that matters on the GPU or TPU of this machine, in at most ten minutes.

    python scripts/on_device.py --out=DIR [--minutes=10] [--parts=accuracy,attention,...]

The parts, each a benchmark of scripts/benchmark.py in a process of its own:

    accuracy     errors of every implementation of attention against float64, beside the promised tolerances
    step         training step of configs/pile_125m.py: tokens/s, MFU
    step_gated   the same of configs/gated_125m.py
    attention    time and memory by the number of tokens, against softmax attention
    losses       200 training steps of configs/demo.py, beside a CPU's losses
    decode       time per token of 1, 32 and 256 texts at a time
    step_keep, step_gated_keep
                 the training steps with model.remat=none, on devices with the memory for it

DIR receives report.md, results.json with all figures, and a folder with the files of each part. What is done is kept:
rerun the same command to run the parts that have failed or for which there was no time; remove DIR to start again. On a
CPU, or with --small, all sizes are small: a rehearsal of some minutes.
"""

import signal
from pathlib import Path

from absl import app, flags

from heinsen.errors import exit_on_error
from scripts.cli import parse_flags

OUT = flags.DEFINE_string("out", None, "Folder for the report and results.", required=True)
MINUTES = flags.DEFINE_float("minutes", 10.0, "Minutes that all parts may take together.")
PARTS = flags.DEFINE_list("parts", [], "Names of the parts to run; default: all.")
SMALL = flags.DEFINE_bool("small", False, "Small sizes, as on a CPU: a rehearsal.")


def main(argv: list[str]) -> None:
    from scripts.benchmarking.on_device import run

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the running part, too
    with exit_on_error(on_interrupt="interrupted; rerun the same command to resume"):
        print(run(Path(OUT.value), MINUTES.value, PARTS.value, SMALL.value))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
