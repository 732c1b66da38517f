"""Every kind of attention in one frame: tuned alike, trained alike, on the same text; then recall, speed, and a report.

    python experiments/attention_comparison/run.py --corpus=CORPUS --out=runs/attention_comparison [--parallel=2]

CORPUS holds {train-*,validation,test}.jsonl.zst. The same command goes on where it was stopped. config.py is what all
contestants share. OUT receives data/, the sweeps tuning*/, final/ and sigmoid/, test/, recall/, and the report:
report.md, results.json, curves.png, sigmoid.png, recall.png.
"""

import sys
from pathlib import Path

from absl import app, flags

from experiments import tools
from experiments.attention_comparison.contestants import CONTESTANTS, RATE, SIGMOIDS, Contestant
from heinsen.sweep.runs import RunView, best_of
from heinsen.sweep.space import SweepError

CORPUS = flags.DEFINE_string("corpus", None, "Folder of {train-*,validation,test}.jsonl.zst.", required=True)
OUT = flags.DEFINE_string("out", "runs/attention_comparison", "Folder of the experiment.")
PARALLEL = flags.DEFINE_integer("parallel", None, "Runs at a time; none: one a GPU, or one a core.", lower_bound=1)
RATES = flags.DEFINE_list("learning_rates", ["1.5e-3", "3e-3", "6e-3", "1.2e-2"], "The grid of the tuning.")
TUNING_TOKENS = flags.DEFINE_integer("tuning_tokens", 700_000, "Of each run of the tuning.", lower_bound=1)
TOKENS = flags.DEFINE_integer("tokens", None, "Of each run that counts; none: config.py's.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 3, "Runs of each contestant, of seeds 1, 2, ...", lower_bound=1)
RECALL_STEPS = flags.DEFINE_integer("recall_steps", 1000, "Steps of each probe of recall.", lower_bound=101)

CONFIG = Path(__file__).resolve().parent / "config.py"
RECALL_LENGTHS = (4, 8, 16, 32)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    out, parallel = Path(OUT.value), PARALLEL.value or tools.at_a_time()
    tools.share_compilations(out)
    try:
        rates = tools.numbers("learning_rates", RATES.value)
        tools.prepare_bytes(Path(CORPUS.value), out / "data")
        tuning, final, sigmoid = train(out, rates, parallel)
        tested = test(out, {"final": final, "sigmoid": sigmoid}, parallel)
        recall = recall_of(out, parallel)
        speed_file = out / "speed.json"
        speed = tools.in_turn({speed_file: ["experiments/attention_comparison/speed.py"]}, 1)[speed_file]
    except (tools.ExperimentError, SweepError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command goes on")
    from experiments.attention_comparison import report

    report.write(out, tuning, final, sigmoid, tested, recall, speed)


def train(out: Path, rates: list[float], parallel: int) -> tuple[list[RunView], ...]:
    """The runs of the three sweeps."""
    everyone = CONTESTANTS | SIGMOIDS
    data = f"--config.data.path={(out / 'data').absolute()}"
    tuning = tune(out, data, rates, parallel)
    best = {name: best_rate(tuning, each) for name, each in everyone.items()}
    options = [data, "--config.log_activations=True", "--config.seed=1"]
    options += [f"--config.total_tokens={TOKENS.value}"] if TOKENS.value else []
    runs = lambda of: [each.settings(best[name]) for name, each in of.items()]
    final = tools.sweep(CONFIG, out / "final", runs(CONTESTANTS), parallel, *options, f"--seeds={SEEDS.value}")
    sigmoid = tools.sweep(CONFIG, out / "sigmoid", runs(SIGMOIDS), parallel, *options, "--seeds=1")
    return tuning, final, sigmoid


def tune(out: Path, data: str, rates: list[float], parallel: int) -> list[RunView]:
    """The runs of the grid; whoever is best at its end gets the next rate, half as high or twice, and then another."""
    everyone = CONTESTANTS | SIGMOIDS
    options = data, f"--config.total_tokens={TUNING_TOKENS.value}"
    wanted = [each.settings(rate) for each in everyone.values() for rate in rates]
    tuning = tools.sweep(CONFIG, out / "tuning", wanted, parallel, *options, may_crash=True)
    for extension in range(1, 3):
        beyond = []
        for each in everyone.values():
            tried, best = [run.run.point[RATE] for run in each.runs_of(tuning)], best_rate(tuning, each)
            if len(tried) > 1 and best in (min(tried), max(tried)):
                beyond.append(each.settings(best / 2 if best == min(tried) else best * 2))
        if beyond:
            folder = out / f"tuning_{extension}"
            tuning += tools.sweep(CONFIG, folder, beyond, parallel, *options, may_crash=True)
    return tuning


def best_rate(tuning: list[RunView], contestant: Contestant) -> float:
    """The learning rate of the lowest validation loss. Raises ExperimentError."""
    best = best_of(contestant.runs_of(tuning))
    if best is None:
        raise tools.ExperimentError(
            f"{contestant} has crashed at all learning rates: give lower --learning_rates, in another --out"
        )
    return best.run.point[RATE]


def test(out: Path, sweeps: dict[str, list[RunView]], parallel: int) -> dict[str, dict]:
    """{run: what eval.py says of it on the test split}, of {folder of a sweep: its runs}."""
    files = {run.name: out / "test" / f"{run.name}.json" for runs in sweeps.values() for run in runs}
    commands = {
        files[run.name]: ["eval.py", f"--workdir={(out / folder / run.name).absolute()}", "--split=test"]
        for folder, runs in sweeps.items()
        for run in runs
    }
    found = tools.in_turn(commands, parallel)
    return {name: found[file] for name, file in files.items()}


def recall_of(out: Path, parallel: int) -> dict[str, dict]:
    """{kind: what scripts/recall.py says of a small model of it}."""
    kinds = [name for name, each in CONTESTANTS.items() if each.block == "heinsen"]
    lengths = ",".join(map(str, RECALL_LENGTHS))
    commands = {
        out / "recall" / kind / "stdout.json": [
            "scripts/recall.py", "--task=associative", f"--lengths={lengths}", f"--steps={RECALL_STEPS.value}",
            f"--out={(out / 'recall' / kind).absolute()}", "--config.model.n_layers=4",
            f"--config.model.attention={kind}",
        ]
        for kind in kinds
    }  # fmt: skip
    found = tools.in_turn(commands, parallel)
    return {kind: found[out / "recall" / kind / "stdout.json"] for kind in kinds}


if __name__ == "__main__":
    app.run(main)
