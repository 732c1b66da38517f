"""Measure everything that matters on the GPU or TPU of this machine, in a quarter of an hour.

    python scripts/on_device.py --out=DIR [--minutes=15] [--parts=accuracy,attention,...]

The parts, each a benchmark of scripts/benchmark.py in a process of its own, in this order:

    accuracy         errors of attention against float64, in float32 and bfloat16
    step, step_fused, step_gated, step_gated_fused, step_gpt2
                     training steps of configs/pile_125m.py, gated_125m.py (with fused kernels) and gpt2_124m.py
    step_fused_...   the paper's step with one thing changed: float32, another remat, XLA's options off
    attention, attention_64
                     time and memory by the number of tokens, beside cuDNN's softmax; heads of 32 and of 64
    step_8192        the paper's step and that with softmax attention, at 8,192 tokens
    tails            attention to heavy tails, beside normal inputs
    decode           time per token of 1, 32 and 256 texts at a time
    losses           200 training steps of configs/demo.py, beside a CPU's losses

DIR receives report.md and results.json after each figure, and a folder with the files of each part. What is done is
kept: rerun the same command to run the parts that have failed or for which there was no time; remove DIR to start
again. On a CPU, or with --small, all sizes are small: a rehearsal of some minutes.
"""

import signal
from pathlib import Path

from absl import app, flags

from heinsen.errors import exit_on_error
from scripts.cli import parse_flags

OUT = flags.DEFINE_string("out", None, "Folder for the report and results.", required=True)
MINUTES = flags.DEFINE_float("minutes", 15.0, "Minutes that all parts may take together.")
PARTS = flags.DEFINE_list("parts", [], "Names of the parts to run; default: all.")
SMALL = flags.DEFINE_bool("small", False, "Small sizes, as on a CPU: a rehearsal.")


def main(argv: list[str]) -> None:
    from scripts.benchmarking.on_device import run

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the running part, too
    with exit_on_error(on_interrupt="interrupted; rerun the same command to resume"):
        print(run(Path(OUT.value), MINUTES.value, PARTS.value, SMALL.value))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
