"""Measure how the output of sigmoid attention scales with the number of keys, in float64, beside the laws.

    python experiments/sigmoid_scaling/run.py --out=DIR [--workdir=RUN]

experiments/sigmoid_scaling/forms.py states the laws. Softmax and heinsen attention are measured as controls. The tokens
are random vectors around a common mean and, with --workdir, hidden states of a trained model on its validation text, in
windows of its training length: in the order of the text, where neighbors resemble each other, and drawn independently.

Prints a table, and writes results.json and sigmoid_scaling.png. Takes a few minutes on 2 CPU cores.
"""

import json
from pathlib import Path

from absl import app, flags, logging

from heinsen.errors import InputError, exit_on_error
from heinsen.files import make_folder, write_atomically
from scripts.cli import parse_counts, parse_flags, show_help

OUT = flags.DEFINE_string("out", "runs/sigmoid_scaling", "Folder for results.json and the figure.")
WORKDIR = flags.DEFINE_string("workdir", None, "Run folder of train.py, for hidden states of text; default: none.")
LENGTHS = flags.DEFINE_list("lengths", [str(2**i) for i in range(4, 16)], "Numbers of keys n.")
SEQUENCES = flags.DEFINE_integer("sequences", 32, "Sequences for each n; they give the errors.", lower_bound=2)
TOKENS = flags.DEFINE_integer("tokens", 2**19, "Tokens of text to compute hidden states of, at most.", lower_bound=1)

show_help(__name__)

import numpy as np

from experiments.sigmoid_scaling import report
from experiments.sigmoid_scaling.forms import FORMS, compile_together
from experiments.sigmoid_scaling.measure import QUERIES, study
from experiments.sigmoid_scaling.tokens import FEATURES, HEADS, random_tokens, text_tokens

MEAN = 1.0  # length of the random tokens' mean relative to their spread


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    with exit_on_error():
        lengths = sorted(set(parse_counts("lengths", LENGTHS.value)))
        if len(lengths) < 3:
            raise InputError(f"--lengths={','.join(LENGTHS.value)}: give three numbers or more, e.g. 16,256,4096")
        print(run(lengths, Path(OUT.value)))


def run(lengths: list[int], out: Path) -> str:
    """Measure, write the results to `out`, and return the report. Raises HeinsenError."""
    make_folder(out)
    rng = np.random.default_rng(0)
    kinds = [random_tokens(rng, MEAN)]
    if WORKDIR.value is not None:
        kinds += text_tokens(rng, Path(WORKDIR.value), TOKENS.value, max(lengths[-1], QUERIES))
    run_all = compile_together(FORMS)
    studies = [study(FORMS, run_all, tokens, lengths, SEQUENCES.value, rng) for tokens in kinds]
    settings = dict(workdir=WORKDIR.value, mean=MEAN)
    write_atomically(out / "results.json", json.dumps(dict(settings=settings, studies=studies), indent=1) + "\n")
    report.plot(studies, out / "sigmoid_scaling.png")
    sizes = f"{HEADS} heads of {FEATURES}, {QUERIES} queries, {SEQUENCES.value} sequences for each n"
    lines = [f"{sizes}; errors are standard errors"]
    for found in studies:
        lines += ["", *report.table(found)]
    return "\n".join([*lines, "", f"written: {out / 'results.json'}, sigmoid_scaling.png"])


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
