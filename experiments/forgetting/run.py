"""What a forget gate is worth with AdamW, and what helps beside it: parts and blocks, tuned and trained alike.

    python experiments/forgetting/run.py --corpus=corpus --out=runs/forgetting [--parallel=2]
    python experiments/forgetting/run.py --report --out=experiments/forgetting

CORPUS is what scripts/build_corpus.py builds. Rerun the same command to resume. config.py is what they share,
and lists them by the question that they answer. OUT receives data/, for each question its sweeps QUESTION/tuning*/ and
QUESTION/final/ and the test split's losses QUESTION/test/, and the report: report.md, results.json, state_size.png.
--report writes the report of a results.json again. Rows of options that heinsen no longer has were measured with an
earlier version.
"""

from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "forgetting")

import jax

from experiments import tools
from experiments.forgetting import config, report
from heinsen.models import init_model_state
from heinsen.training.config import TrainConfig


class Plan(NamedTuple):
    """How much of everything."""

    questions: tuple[str, ...] = tuple(config.CONTESTS)
    rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    tuning_tokens: int = 700_000
    tokens: int = 2_000_000
    n_seeds: int = 3


SMALL_PLAN = Plan(
    questions=("combined",),
    rates=(3e-3,),
    tuning_tokens=150_000,
    tokens=150_000,
    n_seeds=2,
)


def measure(plan: Plan, corpus: Path, out: Path, parallel: int) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises ExperimentError."""
    tools.prepare_bytes(corpus, out / "data")
    length = f"--config.total_tokens={plan.tokens}"
    found: dict[str, Any] = {}
    for question in plan.questions:
        contest, folder = tools.Contest(config, config.CONTESTS[question]), out / question
        data = f"--config.data.path={tools.from_root(out / 'data')}"
        tuning = contest.tune(folder, plan.rates, parallel, data, f"--config.total_tokens={plan.tuning_tokens}")
        options = data, length, "--config.seed=1", f"--seeds={plan.n_seeds}"
        final = contest.train(folder / "final", contest.contestants, tuning, parallel, *options)
        tested = tools.evaluate_runs(folder / "final", final, folder / "test", parallel)
        sizes = {
            name: [state_size(contest.train_config(name), n) for n in report.CONTEXTS] for name in contest.contestants
        }
        found[question] = contest.results(tuning, final, tested) | dict(state=sizes)
    tokens = found[plan.questions[0]]["logs"][-1]["tokens"]
    return dict(settings=config.get_config().to_dict(), tokens=tokens, contests=found)


def state_size(config: TrainConfig, n_tokens: int) -> int:
    """Return how many numbers the states of all layers have after so many tokens."""
    state = jax.eval_shape(lambda: init_model_state(config.model, 1, n_tokens))
    return sum(leaf.size for leaf in jax.tree.leaves((state.attention, state.convolution)))


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
