"""How the output of sigmoid attention scales with the number of keys, in float64, beside the laws.

    python experiments/sigmoid_scaling/run.py --out=OUT

forms.py states the laws. Softmax and heinsen attention are measured as controls. The tokens are random vectors around a
common mean. OUT receives report.md, results.json and the figure, in a few minutes on 2 CPU cores.
"""

from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "sigmoid_scaling", reads_corpus=False, runs="here")

import numpy as np

from experiments import tools
from experiments.sigmoid_scaling import report
from experiments.sigmoid_scaling.forms import FORMS, compile_together
from experiments.sigmoid_scaling.measure import Tokens, study


class Plan(NamedTuple):
    """How much of everything."""

    lengths: tuple[int, ...] = tuple(2**i for i in range(4, 16))  # numbers of keys
    n_sequences: int = 32  # of each; they give the errors


SMALL_PLAN = Plan((16, 32, 64), 2)


def measure(plan: Plan, out: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return study(FORMS, compile_together(FORMS), Tokens.random(rng), plan.lengths, plan.n_sequences, rng)


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
