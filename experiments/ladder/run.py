r"""A scaling ladder, heinsen and softmax side by side: L(N, D) fitted, the next size predicted, then trained.

    python experiments/ladder/run.py --corpus=CORPUS --out=runs/ladder [--parallel=2]
    python experiments/ladder/run.py ... --sizes=6x256,6x384,8x512,12x512,12x768 --next=24x768 \
      --tokens_per_parameter=10,20

CORPUS holds {train-*,validation,test}.jsonl.zst. The same command goes on where it was stopped. Sizes are layers x
width, in heads of 32; each is trained on so many bytes a parameter, with the rates of --learning_rates times 128 /
width. The prediction for the next size is written before it is trained (prediction.json). OUT receives data/, the
sweeps ladder/ and next/, and the report: report.md, results.json, ladder.png.
"""

import json
import os
import re
import sys
from pathlib import Path

import numpy as np
from absl import app, flags

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from experiments import tools
from experiments.ladder import law
from heinsen.sweep.space import SweepError

CORPUS = flags.DEFINE_string("corpus", None, "Folder of {train-*,validation,test}.jsonl.zst.", required=True)
OUT = flags.DEFINE_string("out", "runs/ladder", "Folder of the experiment.")
PARALLEL = flags.DEFINE_integer("parallel", os.cpu_count(), "Runs at a time, which share the cores.", lower_bound=1)
SIZES = flags.DEFINE_list("sizes", ["3x96", "4x96", "3x128", "4x128", "4x160"], "Layers x width of what is fitted.")
RATIOS = flags.DEFINE_list("tokens_per_parameter", ["2", "4"], "Tokens of each size, by its parameters.")
NEXT = flags.DEFINE_string("next", "4x192", "The size to predict, on the most tokens a parameter of all sizes.")
RATES = flags.DEFINE_list(
    "learning_rates", ["heinsen:3e-3", "softmax:3e-3"], "KIND:RATE at width 128, from attention_comparison."
)

CONFIG = Path(__file__).resolve().parent / "config.py"
WIDTH, HEAD = 128, 32
N_BOOTSTRAP = 100


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    out = Path(OUT.value)
    try:
        rates = dict(parse_rate(text) for text in RATES.value)
        sizes, ratios = [parse_size(text) for text in SIZES.value], [parse_ratio(text) for text in RATIOS.value]
        of_next = parse_size(NEXT.value), max(ratios)
        pairs = [(size, ratio) for ratio in ratios for size in sizes]
        if len(pairs) <= law.N_COEFFICIENTS:
            raise ValueError(f"{len(pairs)} runs of each kind: a law of {law.N_COEFFICIENTS} coefficients needs more")
    except ValueError as error:
        sys.exit(f"error: {error}")
    tools.share_compilations(out)
    try:
        tools.prepare_bytes(Path(CORPUS.value), out / "data")
        runs = train(out / "ladder", [settings(kind, *pair, rate) for pair in pairs for kind, rate in rates.items()])
        laws = {kind: fit([run for run in runs if run["kind"] == kind]) for kind in rates}
        prediction = predict(out / "prediction.json", laws, *of_next)
        found = train(out / "next", [settings(kind, *of_next, rate) for kind, rate in rates.items()])
    except (tools.ExperimentError, SweepError, ValueError) as error:
        sys.exit(f"error: {error}")
    from experiments.ladder import report

    report.write(out, runs, laws, prediction, found)


def parse_size(text: str) -> tuple[int, int]:
    """(layers, width). Raises ValueError."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None or int(match[2]) % HEAD:
        raise ValueError(f"size {text!r}: expected LAYERSxWIDTH, such as 4x128; the width is a multiple of {HEAD}")
    return int(match[1]), int(match[2])


def parse_ratio(text: str) -> float:
    """Raises ValueError."""
    try:
        if 0 < float(text) < float("inf"):
            return float(text)
    except ValueError:
        pass
    raise ValueError(f"--tokens_per_parameter: {text!r} is not a positive number")


def parse_rate(text: str) -> tuple[str, float]:
    """(kind, learning rate). Raises ValueError."""
    kind, _, rate = text.rpartition(":")
    if not kind:
        raise ValueError(f"--learning_rates: {text!r}: expected KIND:RATE, such as heinsen:3e-3")
    return kind, float(rate)


def n_params(size: tuple[int, int]) -> int:
    """Of the paper's model, whatever its attention."""
    n_layers, width = size
    return n_layers * (6 * width**2 + 7 * width) + 2 * width**2 + 2 * width + 264 * width + 2 * width


def settings(kind: str, size: tuple[int, int], ratio: float, rate: float) -> tools.Settings:
    n_layers, width = size
    return {
        "model.attention": kind,
        "model.n_layers": n_layers,
        "model.d_model": width,
        "model.n_heads": width // HEAD,
        "total_tokens": round(ratio * n_params(size)),
        "optimizer.learning_rate": rate * WIDTH / width,
    }


def train(out: Path, runs: list[tools.Settings]) -> list[dict]:
    """Of each run its kind, size, parameters, tokens and final validation loss."""
    views = tools.sweep(
        CONFIG, out, sorted(runs, key=lambda run: run["total_tokens"]), PARALLEL.value,
        f"--config.data.path={(out.parent / 'data').absolute()}",
    )  # fmt: skip
    found = []
    for view in views:
        size = view.run.point["model.n_layers"], view.run.point["model.d_model"]
        found.append(
            dict(
                kind=view.run.point["model.attention"],
                size="{}x{}".format(*size),
                n_params=n_params(size),
                tokens=view.tokens,
                learning_rate=view.run.point["optimizer.learning_rate"],
                loss=view.validation_loss,
                bits_per_byte=view.bits_per_byte,
            )
        )
    return found


def fit(runs: list[dict]) -> tuple[law.Law, list[law.Law]]:
    """The law of one kind's runs, and those of the bootstrap."""
    arrays = [np.array([run[name] for run in runs], float) for name in ("n_params", "tokens", "loss")]
    best = law.fit(*arrays)
    return best, law.bootstrap(best, *arrays, N_BOOTSTRAP)


def predict(file: Path, laws: dict, size: tuple[int, int], ratio: float) -> dict[str, dict]:
    """{kind: loss and 95% interval}, written to `file` before the size is trained; what stands there stays."""
    if not file.exists():
        n = n_params(size)
        prediction = {}
        for kind, (best, others) in laws.items():
            low, high = np.percentile([other(n, ratio * n) for other in others], [2.5, 97.5])
            prediction[kind] = dict(loss=float(best(n, ratio * n)), low=float(low), high=float(high))
        file.write_text(json.dumps(prediction, indent=1) + "\n")
    return json.loads(file.read_text())


if __name__ == "__main__":
    app.run(main)
