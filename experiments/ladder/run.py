r"""A scaling ladder, heinsen and softmax side by side: L(N, D) fitted, the next size predicted, then trained.

    python experiments/ladder/run.py --corpus=CORPUS --out=runs/ladder [--parallel=2]
    python experiments/ladder/run.py ... --sizes=6x256,6x384,8x512,12x512,12x768 --next=24x768 \
      --tokens_per_parameter=10,20

CORPUS holds {train-*,validation,test}.jsonl.zst. The same command goes on where it was stopped. Sizes are layers x
width, in heads of 32; each is trained on so many bytes a parameter, with the rates of --learning_rates times 128 /
width. The prediction for the next size is written before it is trained (prediction.json). OUT receives data/, the
sweeps ladder/ and next/, and the report: report.md, results.json, ladder.png.
"""

import functools
import json
import re
import sys
from pathlib import Path

import numpy as np
from absl import app, flags

from experiments import tools
from experiments.ladder import config, law
from heinsen.config import from_mapping
from heinsen.files import write_atomically
from heinsen.sweep.space import SweepError
from heinsen.training.run import TrainConfig

CORPUS = flags.DEFINE_string("corpus", None, "Folder of {train-*,validation,test}.jsonl.zst.", required=True)
OUT = flags.DEFINE_string("out", "runs/ladder", "Folder of the experiment.")
PARALLEL = flags.DEFINE_integer("parallel", None, "Runs at a time; none: one a GPU, or one a core.", lower_bound=1)
SIZES = flags.DEFINE_list("sizes", ["2x96", "3x96", "4x96", "3x128", "4x128"], "Layers x width of what is fitted.")
RATIOS = flags.DEFINE_list("tokens_per_parameter", ["2", "4"], "Tokens of each size, by its parameters.")
NEXT = flags.DEFINE_string("next", "4x160", "The size to predict, on the most tokens a parameter of all sizes.")
RATES = flags.DEFINE_list(
    "learning_rates", ["heinsen:3e-3", "softmax:3e-3"], "KIND:RATE at width 128, from attention_comparison."
)

CONFIG = Path(__file__).resolve().parent / "config.py"
WIDTH, HEAD = 128, 32
N_BOOTSTRAP = 100


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    out, parallel = Path(OUT.value), PARALLEL.value or tools.at_a_time()
    tools.share_compilations(out)
    try:
        rates, sizes = dict(map(parse_rate, RATES.value or [""])), list(map(parse_size, SIZES.value))
        ratios = tools.numbers("tokens_per_parameter", RATIOS.value)
        of_next = parse_size(NEXT.value), max(ratios)
        pairs = [(size, ratio) for ratio in ratios for size in sizes]
        if len(pairs) <= law.N_COEFFICIENTS:
            raise tools.ExperimentError(
                f"{len(pairs)} runs of each kind: a law of {law.N_COEFFICIENTS} coefficients needs more"
            )
        if of_next in pairs:
            raise tools.ExperimentError(f"--next={NEXT.value} is one of --sizes: there is nothing to predict")
        tools.prepare_bytes(Path(CORPUS.value), out / "data")
        of_kinds = lambda *pairs: [settings(kind, *pair, rate) for pair in pairs for kind, rate in rates.items()]
        runs = train(out / "ladder", of_kinds(*pairs), parallel)
        laws = {kind: fit([run for run in runs if run["kind"] == kind]) for kind in rates}
        prediction = predict(out / "prediction.json", laws, *of_next)
        found = train(out / "next", of_kinds(of_next), parallel)
    except (tools.ExperimentError, SweepError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on")
    from experiments.ladder import report

    report.write(out, runs, laws, prediction, found)


def parse_size(text: str) -> tuple[int, int]:
    """(layers, width). Raises ExperimentError."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None or int(match[2]) % HEAD:
        raise tools.ExperimentError(
            f"size {text!r}: expected LAYERSxWIDTH, such as 4x128; the width is a multiple of {HEAD}"
        )
    return int(match[1]), int(match[2])


def parse_rate(text: str) -> tuple[str, float]:
    """(kind, learning rate). Raises ExperimentError."""
    kind, _, rate = text.rpartition(":")
    if not kind:
        raise tools.ExperimentError(f"--learning_rates: {text!r}: expected KIND:RATE, such as heinsen:3e-3")
    return kind, tools.numbers("learning_rates", [rate])[0]


@functools.cache
def n_params(size: tuple[int, int]) -> int:
    mapping = config.get_config()
    mapping.update_from_flattened_dict(fields_of(size))
    return tools.n_params(from_mapping(TrainConfig, mapping.to_dict()))


def fields_of(size: tuple[int, int]) -> dict[str, int]:
    n_layers, width = size
    return {"model.n_layers": n_layers, "model.d_model": width, "model.n_heads": width // HEAD}


def settings(kind: str, size: tuple[int, int], ratio: float, rate: float) -> tools.Settings:
    return fields_of(size) | {
        "model.attention": kind,
        "total_tokens": round(ratio * n_params(size)),
        "optimizer.learning_rate": float(f"{rate * WIDTH / size[1]:.4g}"),
    }


def train(out: Path, runs: list[tools.Settings], parallel: int) -> list[dict]:
    """Of each run its kind, size, parameters, tokens and final validation loss."""
    data = f"--config.data.path={(out.parent / 'data').absolute()}"
    found = []
    for view in tools.sweep(CONFIG, out, sorted(runs, key=lambda run: run["total_tokens"]), parallel, data):
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
    """The law of one kind's runs, those of the bootstrap, and the residuals that it drew from."""
    arrays = [np.array([run[name] for run in runs], float) for name in ("n_params", "tokens", "loss")]
    best = law.fit(*arrays)
    return best, law.bootstrap(best, *arrays, N_BOOTSTRAP), law.residuals(best, *arrays)


def predict(file: Path, laws: dict, size: tuple[int, int], ratio: float) -> dict[str, dict]:
    """{kind: loss and the interval that holds 95% of new runs}, written to `file` before the size is trained.

    What stands there stays. Raises ExperimentError where that is another size's.
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
        raise tools.ExperimentError(f"{file} is of another size ({', '.join(wrong)}): give another --out")
    return kept["predictions"]


if __name__ == "__main__":
    app.run(main)
