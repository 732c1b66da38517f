r"""A scaling ladder of heinsen and softmax attention: fit L(N, D), predict the next size, then train it.

    python experiments/ladder/run.py --corpus=CORPUS --out=runs/ladder [--parallel=2]
    python experiments/ladder/run.py ... --sizes=6x256,6x384,8x512,12x512,12x768 --next=24x768 \
      --tokens_per_parameter=10,20

CORPUS holds {train-*,validation,test}.jsonl.zst. Rerun the same command to resume. Sizes are layers x width, in heads
of 32; each is trained on so many bytes per parameter, with the learning rates of --learning_rates times 128 / width.
The prediction for the next size is written before it is trained (prediction.json). OUT receives data/, the sweeps
ladder/ and next/, and the report: report.md, results.json, ladder.png.
"""

import functools
import json
import re
from pathlib import Path

import numpy as np
from absl import app, flags

from configs import parse_flags
from experiments import tools
from experiments.ladder import config, law, report
from heinsen.config import from_mapping
from heinsen.files import write_atomically
from heinsen.training.run import TrainConfig

CORPUS = flags.DEFINE_string("corpus", None, "Folder of {train-*,validation,test}.jsonl.zst.", required=True)
OUT = flags.DEFINE_string("out", "runs/ladder", "Folder of the experiment.")
PARALLEL = flags.DEFINE_integer(
    "parallel", None, "Runs at a time; default: one per GPU, or one per core.", lower_bound=1
)
SIZES = flags.DEFINE_list("sizes", ["2x96", "3x96", "4x96", "3x128", "4x128"], "Layers x width of the runs to fit.")
RATIOS = flags.DEFINE_list("tokens_per_parameter", ["2", "4"], "Tokens per parameter at which each size is trained.")
NEXT = flags.DEFINE_string("next", "4x160", "The size to predict, at the largest number of tokens per parameter.")
RATES = flags.DEFINE_list(
    "learning_rates", ["heinsen:3e-3", "softmax:3e-3"], "KIND:RATE at width 128, from attention_comparison."
)

CONFIG = Path(__file__).resolve().parent / "config.py"
WIDTH, HEAD = 128, 32  # the width of --learning_rates, and of a head
N_BOOTSTRAP = 100

Size = tuple[int, int]  # layers, width


def main(argv: list[str]) -> None:
    tools.execute(run, argv, OUT.value, PARALLEL.value)


def run(out: Path, parallel: int) -> str:
    """Do what is left of the experiment, and return its report. Raises ExperimentError."""
    tools.share_compilations(out)
    rates, sizes = dict(map(parse_rate, RATES.value or [""])), list(map(parse_size, SIZES.value))
    ratios = tools.parse_numbers("tokens_per_parameter", RATIOS.value)
    ladder, next_step = [(size, ratio) for ratio in ratios for size in sizes], (parse_size(NEXT.value), max(ratios))
    if len(ladder) <= law.N_COEFFICIENTS:
        raise tools.ExperimentError(
            f"{len(ladder)} runs of each kind: a law with {law.N_COEFFICIENTS} coefficients needs more"
        )
    if next_step in ladder:
        raise tools.ExperimentError(f"--next={NEXT.value} is one of --sizes: there is nothing to predict")
    tools.prepare_bytes(tools.splits_of(Path(CORPUS.value)), out / "data")
    of_all_kinds = lambda *steps: [settings(kind, *step, rate) for step in steps for kind, rate in rates.items()]
    runs = train(out / "ladder", of_all_kinds(*ladder), parallel)
    laws = {kind: fit([run for run in runs if run["kind"] == kind]) for kind in rates}
    prediction = predict(out / "prediction.json", laws, *next_step)
    found = train(out / "next", of_all_kinds(next_step), parallel)
    return report.write(out, runs, laws, prediction, found)


def parse_size(text: str) -> Size:
    """Return (layers, width). Raises ExperimentError."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None or int(match[2]) % HEAD:
        raise tools.ExperimentError(
            f"size {text!r}: expected LAYERSxWIDTH, such as 4x128; the width is a multiple of {HEAD}"
        )
    return int(match[1]), int(match[2])


def parse_rate(text: str) -> tuple[str, float]:
    """Return (kind, learning rate). Raises ExperimentError."""
    kind, _, rate = text.rpartition(":")
    if not kind:
        raise tools.ExperimentError(f"--learning_rates: {text!r}: expected KIND:RATE, such as heinsen:3e-3")
    return kind, tools.parse_numbers("learning_rates", [rate])[0]


@functools.cache
def n_params(size: Size) -> int:
    mapping = config.get_config()
    mapping.update_from_flattened_dict(fields_of(size))
    return tools.n_params(from_mapping(TrainConfig, mapping.to_dict()))


def fields_of(size: Size) -> dict[str, int]:
    n_layers, width = size
    return {"model.n_layers": n_layers, "model.d_model": width, "model.n_heads": width // HEAD}


def settings(kind: str, size: Size, ratio: float, rate: float) -> tools.Settings:
    return fields_of(size) | {
        "model.attention": kind,
        "total_tokens": round(ratio * n_params(size)),
        "optimizer.learning_rate": float(f"{rate * WIDTH / size[1]:.4g}"),
    }


def train(out: Path, runs: list[tools.Settings], parallel: int) -> list[dict]:
    """Return the kind, size, parameters, tokens and final validation loss of each run."""
    data = f"--config.data.path={(out.parent / 'data').absolute()}"
    found = []
    for view in tools.run_sweep(CONFIG, out, sorted(runs, key=lambda run: run["total_tokens"]), parallel, data):
        point = view.run.point
        size = point["model.n_layers"], point["model.d_model"]
        found.append(
            dict(
                kind=point["model.attention"],
                size="{}x{}".format(*size),
                n_params=n_params(size),
                tokens=view.tokens,
                learning_rate=point["optimizer.learning_rate"],
                loss=view.validation_loss,
                bits_per_byte=view.bits_per_byte,
            )
        )
    return found


def fit(runs: list[dict]) -> tuple[law.Law, list[law.Law], np.ndarray]:
    """Return the law of the runs of one kind, the laws of the bootstrap, and the residuals that it drew from."""
    arrays = [np.array([run[name] for run in runs], float) for name in ("n_params", "tokens", "loss")]
    best = law.fit(*arrays)
    return best, law.bootstrap(best, *arrays, N_BOOTSTRAP), law.residuals(best, *arrays)


def predict(file: Path, laws: report.Laws, size: Size, ratio: float) -> dict[str, dict]:
    """Return {kind: loss and 95% interval for new runs}, which is written to `file` before the size is trained.

    An existing file is kept. Raises ExperimentError if it is for another size.
    """
    n = n_params(size)
    what = dict(size="{}x{}".format(*size), tokens=round(ratio * n), kinds=list(laws))
    if not file.exists():
        rng, found = np.random.default_rng(0), {}
        for kind, (best, others, residuals) in laws.items():
            draws = [other(n, ratio * n) * np.exp(rng.choice(residuals, 20)) for other in others]
            low, high = np.percentile(draws, [2.5, 97.5])
            found[kind] = dict(loss=float(best(n, ratio * n)), low=float(low), high=float(high))
        write_atomically(file, json.dumps(what | {"predictions": found}, indent=1) + "\n")
    kept = json.loads(file.read_text())
    if wrong := [f"{name} {kept[name]}" for name, value in what.items() if kept[name] != value]:
        raise tools.ExperimentError(f"{file} is for another size ({', '.join(wrong)}): give another --out")
    return kept["predictions"]


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
