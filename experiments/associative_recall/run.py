"""Multi-query associative recall as in Zoology, by every kind of attention: accuracy by width and by state size.

    python experiments/associative_recall/run.py --out=runs/associative_recall [--parallel=2]
    python experiments/associative_recall/run.py --report --out=experiments/associative_recall

Each run is one of scripts/recall.py --task=mqar: n key-value pairs in 16 n tokens, in turn for all numbers of pairs,
then tested on more of them, of which training sees none. A run ends at so many steps, or once 99% of its answers are
right. Rerun the same command to resume: finished runs are kept. config.py lists who takes part. OUT receives runs/ and
the report: report.md, results.json, recall.png. --report writes the report of a results.json again.
"""

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "associative_recall", reads_corpus=False)

from experiments import tools
from experiments.associative_recall import config, report
from heinsen.config import from_mapping
from heinsen.evaluation.probes import MQAR_SPREAD
from heinsen.models import ModelConfig, state_size
from heinsen.sweep.space import Value, format_value

SOLVED = 0.99


class Plan(NamedTuple):
    """What to run: every combination of the first four."""

    kinds: tuple[str, ...] = tuple(config.CONTESTANTS)
    widths: tuple[int, ...] = (32, 64, 128)
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)
    seeds: tuple[int, ...] = (1,)
    pairs: tuple[int, ...] = (4, 8, 16)
    test_pairs: tuple[int, ...] = (32, 64)
    n_heads: int = 2
    n_steps: int = 4185


SMALL_PLAN = Plan(
    kinds=("softmax", "heinsen", "heinsen-gate-convolution"),
    widths=(16,),
    rates=(1e-2,),
    pairs=(2, 4),
    test_pairs=(8,),
    n_steps=651,
)


class Point(NamedTuple):
    """One run."""

    kind: str
    width: int
    rate: float
    seed: int


def measure(plan: Plan, out: Path, parallel: int) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises ExperimentError."""
    points = [  # the widest first: then those that run at the same time end at nearly the same time
        Point(kind, width, rate, seed)
        for seed in plan.seeds
        for width in sorted(plan.widths, reverse=True)
        for kind in plan.kinds
        for rate in plan.rates
    ]
    folders = {point: out / "runs" / f"{'_'.join(map(str, point))}" for point in points}
    commands = {folder / "stdout.json": arguments(plan, point, folder) for point, folder in folders.items()}
    found = tools.run_programs(commands, parallel, may_fail=True)
    runs = [describe(point, found[folder / "stdout.json"]) for point, folder in folders.items()]
    return dict(
        settings=config.get_config().to_dict(),
        grid=plan._asdict() | {"spread": MQAR_SPREAD},
        runs=runs,
        models=[summarize(plan, runs, kind, width) for kind in plan.kinds for width in plan.widths],
    )


def model_fields(plan: Plan, kind: str, width: int) -> dict[str, Value]:
    """Return the fields of a contestant's model. The heads share its width."""
    features = width // plan.n_heads
    return dict(d_model=width, n_heads=plan.n_heads, d_key=features, d_value=features) | config.CONTESTANTS[kind]


def arguments(plan: Plan, point: Point, folder: Path) -> list[str]:
    """Return the arguments of a run's program."""
    join = lambda numbers: ",".join(map(str, numbers))
    fields = {f"model.{name}": value for name, value in model_fields(plan, point.kind, point.width).items()}
    fields |= {"optimizer.learning_rate": point.rate, "seed": point.seed}
    return [
        "scripts/recall.py", "--config=experiments/associative_recall/config.py", "--task=mqar",
        f"--lengths={join(plan.pairs)}", f"--test_lengths={join((*plan.pairs, *plan.test_pairs))}",
        f"--steps={plan.n_steps}", f"--stop_at={SOLVED}", f"--out={tools.from_root(folder)}",
        *(f"--config.{name}={format_value(value)}" for name, value in fields.items()),
    ]  # fmt: skip


def describe(point: Point, found: dict[str, Any] | None) -> dict[str, Any]:
    """Return a run of results.json; without accuracy if it has failed."""
    run: dict[str, Any] = point._asdict() | {"accuracy": None}
    if found is not None:
        run |= {name: found[name] for name in ("parameters", "steps", "tokens", "loss", "seconds")}
        run["accuracy"] = {each["length"]: each["answers"] for each in found["accuracy"]}
    return run


def summarize(plan: Plan, runs: list[dict[str, Any]], kind: str, width: int) -> dict[str, Any]:
    """Return a model's size, its accuracy at each learning rate, and that of all lengths at the best one.

    The best has the highest mean accuracy on the lengths of training, over seeds. A failed run recalls nothing. Raises
    ExperimentError if all have failed.
    """
    own = [run for run in runs if (run["kind"], run["width"]) == (kind, width)]
    done = [run for run in own if run["accuracy"] is not None]
    if not done:
        raise tools.ExperimentError(f"{kind} of width {width} has failed at all learning rates: see the logs in runs/")
    score = lambda run: statistics.fmean(run["accuracy"][n] for n in plan.pairs) if run["accuracy"] else 0.0
    scores = {rate: [score(run) for run in own if run["rate"] == rate] for rate in plan.rates}
    best = max(scores, key=lambda rate: statistics.fmean(scores[rate]))
    at_best = [run for run in done if run["rate"] == best]
    model = config.get_config().model
    model.update(model_fields(plan, kind, width))
    return dict(
        kind=kind,
        width=width,
        parameters=done[0]["parameters"],
        state=state_size(from_mapping(ModelConfig, model.to_dict(), "model"), MQAR_SPREAD * max(plan.pairs)),
        rate=best,
        tokens=statistics.fmean(run["tokens"] for run in at_best),
        accuracy={n: statistics.fmean(run["accuracy"][n] for run in at_best) for n in at_best[0]["accuracy"]},
        scores=scores,
    )


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
