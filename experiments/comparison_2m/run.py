"""The paper's attention, gated attention and softmax at 2M parameters and 8M bytes: loss, contexts, recall, cost.

    python experiments/comparison_2m/run.py --corpus=corpus --out=runs/comparison_2m [--parallel=2]
    python experiments/comparison_2m/run.py --report --out=experiments/comparison_2m

CORPUS is what scripts/build_corpus.py builds; its last training file is kept for the test of long documents. Rerun the
same command to resume. config.py is what all contestants share, and lists them. OUT receives data/, the sweeps tuning*/
and final/, test/ and long/ (losses of the test split, and by position in long documents), recall/, costs, and the
report: report.md, results.json, curves.png, costs.png, positions.png, recall.png. --report writes the report of a
results.json again.
"""

from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "comparison_2m")

from experiments import contexts, tools
from experiments.comparison_2m import report
from heinsen.sweep.space import SEED, Value, format_value


class Plan(NamedTuple):
    """How much of everything.

    speed_lengths: tokens of a sequence in training; contexts: tokens read before decoding.
    """

    contest: str = "all"  # of config.py
    rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    tuning_tokens: int = 2_000_000
    tokens: int = 8_000_000
    n_seeds: int = 3
    n_documents: int = 16
    longest: int = 65_536
    recall_steps: int = 2000
    speed_lengths: tuple[int, ...] = (1024, 8192)
    contexts: tuple[int, ...] = (1024, 65_536, 1_048_576)


SMALL_PLAN = Plan(
    contest="small",
    rates=(3e-3,),
    tuning_tokens=220_000,
    tokens=220_000,
    n_seeds=1,
    n_documents=4,
    longest=16_384,
    recall_steps=150,
    speed_lengths=(1024,),
    contexts=(1024, 8192),
)


def measure(plan: Plan, corpus: Path, out: Path, parallel: int) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises ExperimentError."""
    contest = tools.find_contest("comparison_2m", plan.contest)
    documents = contexts.prepare(corpus, out, plan.n_documents, plan.longest)
    data = f"--config.data.path={tools.from_root(out / 'data')}"
    tuning = contest.tune(out, plan.rates, parallel, data, f"--config.total_tokens={plan.tuning_tokens}")
    options = data, f"--config.total_tokens={plan.tokens}", "--config.seed=1", f"--seeds={plan.n_seeds}"
    final = contest.train(out / "final", contest.contestants, tuning, parallel, *options)
    first = {
        name: run for name in contest.contestants for run in contest.runs_of(name, final) if run.run.point[SEED] == 1
    }
    tested = tools.evaluate_runs(out / "final", final, out / "test", parallel)
    runs = [*tuning, *final]
    recall = measure_recall(contest, plan.recall_steps, out / "recall", parallel)
    return contest.results(tuning, final, tested) | dict(
        runs=len(runs),
        hours=sum(run.tokens / run.tokens_per_second for run in runs if run.tokens_per_second) / 3600,
        tokens=final[0].tokens,
        by_documents={name: tested[run.name]["bits_per_byte_interval"] for name, run in first.items()},
        positions=contexts.measure(contest, first, out / "final", documents, out / "long", parallel),
        recall_steps=plan.recall_steps,
        recall={name: {each["length"]: each["answers"] for each in recall[name]["accuracy"]} for name in recall},
        recall_runs=recall,
        **tools.measure_costs(
            out / "costs.json", "comparison_2m", plan.contest, lengths=plan.speed_lengths, contexts=plan.contexts
        ),
    )


def measure_recall(contest: tools.Contest, n_steps: int, out: Path, parallel: int) -> dict[str, dict[str, Any]]:
    """Train and test a model of each contestant's kind; return what scripts/recall.py says of it."""
    commands, pairs = {}, ",".join(map(str, report.PAIRS))
    for number, fields in enumerate(contest.contestants.values()):
        given: dict[str, Value] = {k: v for k, v in fields.items() if k != "d_model"} | {"n_layers": report.LAYERS}
        folder = out / str(number)
        commands[folder / "stdout.json"] = [
            "scripts/recall.py", "--task=associative", f"--lengths={pairs}",
            f"--steps={n_steps}", f"--out={tools.from_root(folder)}",
            *(f"--config.model.{field}={format_value(value)}" for field, value in given.items()),
        ]  # fmt: skip
    found = tools.run_programs(commands, parallel)
    return dict(zip(contest.contestants, map(found.__getitem__, commands), strict=True))


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
