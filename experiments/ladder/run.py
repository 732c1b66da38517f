r"""A scaling ladder of the paper's, gated and softmax attention: fit L(N, D), predict the next size, then train it.

    python experiments/ladder/run.py --corpus=corpus --out=runs/ladder [--parallel=2]
    python experiments/ladder/run.py ... --sizes=6x256,6x384,8x512,12x512,12x768 --next=24x768 --tokens=5e8,5e9 \
      --tuned_sizes=6x256,12x512 --checked_size=6x384

CORPUS is what scripts/build_corpus.py builds. Rerun the same command to resume. contestants.py lists the kinds; sizes
are layers x width of the paper's model, with heads of 32. --tokens are budgets, numbers of bytes for the largest size;
smaller ones take less, as the root of their parameters, which tells the law more than equal numbers do. Learning rates
are tuned at two sizes; those of the others lie on the power of the width between them, which is checked at a third
size. The prediction for the next size is written before it is trained (prediction.json). OUT receives data/, the
sweeps tuning/SIZE/, checked/, ladder/ and next/, and the report: report.md, results.json, ladder.png.
"""

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

from heinsen.files import write_atomically
from scripts.cli import parse_flags, show_help

CORPUS = flags.DEFINE_string("corpus", None, "Folder of {train-*,validation,test}.jsonl.zst.", required=True)
OUT = flags.DEFINE_string("out", "runs/ladder", "Folder of the experiment.")
PARALLEL = flags.DEFINE_integer(
    "parallel", None, "Runs at a time; default: one per GPU, or one per core.", lower_bound=1
)
SIZES = flags.DEFINE_list(
    "sizes", ["4x64", "4x96", "4x128", "6x128", "6x160", "8x192"], "Layers x width of the runs to fit."
)
TOKENS = flags.DEFINE_list("tokens", ["1.5e6", "6e6"], "Budgets: tokens of the largest of the sizes.")
NEXT = flags.DEFINE_string("next", "12x224", "The size to predict, with the largest budget.")
RATES = flags.DEFINE_list("learning_rates", ["3e-3", "6e-3", "1.2e-2"], "Learning rates to tune over.")
TUNED = flags.DEFINE_list("tuned_sizes", ["4x64", "6x160"], "The two sizes to tune, with the smallest budget.")
CHECKED = flags.DEFINE_string("checked_size", "4x128", "The size where the rule between the two is checked.")
SMALL = flags.DEFINE_bool("small", False, "Everything in minutes: a rehearsal, whose results mean nothing.")

show_help(__name__)

import numpy as np

from experiments import tools
from experiments.contest import RATE
from experiments.ladder import config, law, report
from experiments.ladder.contestants import KINDS, Size, contest_of, n_params, parse_size

N_BOOTSTRAP = 100


class Plan(NamedTuple):
    """What the flags ask for."""

    sizes: list[Size]
    budgets: list[int]
    next: Size
    rates: list[float]
    tuned: list[Size]
    checked: Size

    def tokens_of(self, size: Size, budget: int) -> int:
        """Return the tokens of a size: the budget is that of the largest of `sizes`."""
        return round(budget * math.sqrt(n_params(size) / max(map(n_params, self.sizes))))

    def flops(self) -> float:
        """Return the FLOPs of all runs, without those that extend the grid of learning rates."""
        fewest, most = min(self.budgets), max(self.budgets)
        runs = [(size, fewest) for size in self.tuned for _ in self.rates] + [(self.checked, fewest)] * 3
        runs += [*itertools.product(self.sizes, self.budgets), (self.next, most)]
        return sum(contest_of(size).train_flops(KINDS, self.tokens_of(size, budget)) for size, budget in runs)


SMALL_FLAGS = {
    "sizes": "2x32,2x64,4x64",
    "next": "4x96",
    "tokens": "3.5e5,7e5",
    "learning_rates": "3e-3",
    "tuned_sizes": "2x32,4x64",
    "checked_size": "2x64",
}


def main(argv: list[str]) -> None:
    tools.execute(run, OUT.value, PARALLEL.value, SMALL_FLAGS if SMALL.value else None)


def run(out: Path, parallel: int) -> str:
    """Do what is left of the experiment, and return its report. Raises ExperimentError."""
    plan = read_plan()
    fewest = plan.tokens_of(min(plan.sizes, key=n_params), min(plan.budgets))
    tools.check_tokens(config.get_config(), tokens=fewest)
    tools.expect_training(plan.flops())
    tools.share_compilations(out)
    tools.prepare_bytes(tools.splits_of(Path(CORPUS.value)), out / "data")
    rule = Rule(tune(out, plan, parallel))
    checked = check(out, plan, rule, parallel)
    runs = train(out / "ladder", plan, plan.sizes, plan.budgets, rule, parallel)
    laws = {kind: fit([run for run in runs if run["kind"] == kind]) for kind in KINDS}
    largest = max(plan.budgets)
    prediction = predict(out / "prediction.json", laws, plan.next, plan.tokens_of(plan.next, largest))
    found = train(out / "next", plan, [plan.next], [largest], rule, parallel)
    tuning = {str(size): losses for size, losses in rule.tuning.items()}
    return report.write(
        out, report.Found(tuning, rule.powers(), {str(plan.checked): checked}, runs, laws, prediction, found)
    )


def read_plan() -> Plan:
    """Return the plan of the flags. Raises ExperimentError."""
    sizes, tuned = [[parse_size(text) for text in flag.value] for flag in (SIZES, TUNED)]
    budgets = tools.parse_counts("tokens", TOKENS.value)
    plan = Plan(
        sizes,
        budgets,
        parse_size(NEXT.value),
        tools.parse_numbers("learning_rates", RATES.value),
        tuned,
        parse_size(CHECKED.value),
    )
    if len(sizes) * len(budgets) <= law.N_COEFFICIENTS:
        raise tools.ExperimentError(
            f"{len(sizes) * len(budgets)} runs of each kind: a law with {law.N_COEFFICIENTS} coefficients needs more"
        )
    if plan.next in sizes:
        raise tools.ExperimentError(f"--next={plan.next} is one of --sizes: there is nothing to predict")
    if len({size.width for size in tuned}) != 2 or len(tuned) != 2:
        raise tools.ExperimentError(f"--tuned_sizes={','.join(TUNED.value)}: expected two sizes of different width")
    return plan


# ---- learning rates -------------------------------------------------------------------------------

Losses = Mapping[float, float]  # {learning rate: validation loss}; infinite: crashed


class Rule(NamedTuple):
    """Learning rates: a power of the width for each kind, through the best ones of two sizes.

    tuning: {size: {kind: losses}}.
    """

    tuning: Mapping[Size, Mapping[str, Losses]]

    def powers(self) -> dict[str, float]:
        """Return {kind: p}, where the learning rate is proportional to width^p."""
        return {kind: self._power(kind) for kind in KINDS}

    def rate(self, kind: str, size: Size) -> float:
        """Return a learning rate with three digits."""
        first = next(iter(self.tuning))
        rate = best_between(self.tuning[first][kind]) * (size.width / first.width) ** self._power(kind)
        return float(f"{rate:.3g}")

    def _power(self, kind: str) -> float:
        (narrow, low), (wide, high) = ((size.width, best_between(each[kind])) for size, each in self.tuning.items())
        return math.log(high / low) / math.log(wide / narrow)


def best_between(losses: Losses) -> float:
    """Return the learning rate at the vertex of the parabola, in its logarithm, through the best one and those beside.

    At an end of the grid, and beside a crashed run, it is the best one itself.
    """
    rates = sorted(losses)
    best = min(rates, key=losses.__getitem__)
    around = rates[max(rates.index(best) - 1, 0) : rates.index(best) + 2]
    if len(around) < 3 or not all(math.isfinite(losses[rate]) for rate in around):
        return best
    a, b, _ = np.polyfit(np.log(around), [losses[rate] for rate in around], 2)
    return math.exp(-b / (2 * a)) if a > 0 else best


def tune(out: Path, plan: Plan, parallel: int) -> dict[Size, dict[str, Losses]]:
    """Return the losses by learning rate of all kinds at the sizes to tune."""
    found = {}
    for size in plan.tuned:
        contest = contest_of(size)
        runs = contest.tune(
            out / "tuning" / str(size),
            KINDS,
            plan.rates,
            parallel,
            *options(out, plan.tokens_of(size, min(plan.budgets))),
        )
        found[size] = {kind: contest.losses(kind, runs) for kind in KINDS}
    return found


def check(out: Path, plan: Plan, rule: Rule, parallel: int) -> dict[str, Losses]:
    """Return the losses of all kinds at the size to check: with the rule's rate, half of it and twice as much."""
    contest, folder = contest_of(plan.checked), out / "checked"
    rates = {kind: rule.rate(kind, plan.checked) for kind in KINDS}
    wanted = [contest.fields(kind) | {RATE: rate * x} for kind, rate in rates.items() for x in (0.5, 1, 2)]
    given = options(out, plan.tokens_of(plan.checked, min(plan.budgets)))
    runs = tools.run_sweep(contest.config, folder, wanted, parallel, *given, may_crash=True)
    return {kind: contest.losses(kind, runs) for kind in KINDS}


def options(out: Path, tokens: int) -> list[str]:
    return [f"--config.data.path={tools.from_root(out / 'data')}", f"--config.total_tokens={tokens}"]


# ---- the ladder -----------------------------------------------------------------------------------


def train(
    out: Path, plan: Plan, sizes: Sequence[Size], budgets: Sequence[int], rule: Rule, parallel: int
) -> list[dict]:
    """Return the kind, size, parameters, budget, tokens, rate and validation loss of each run, the smallest first.

    `out` is in the experiment's folder.
    """
    wanted, said = [], []
    for budget in sorted(budgets):
        for size in sorted(sizes, key=n_params):
            for kind in KINDS:
                rate, contest = rule.rate(kind, size), contest_of(size)
                wanted.append(contest.fields(kind) | {"total_tokens": plan.tokens_of(size, budget), RATE: rate})
                n = contest.parameters(kind)
                said.append(dict(kind=kind, size=str(size), n_params=n, budget=budget, learning_rate=rate))
    data = f"--config.data.path={tools.from_root(out.parent / 'data')}"
    views = tools.run_sweep(contest_of(sizes[0]).config, out, wanted, parallel, data)
    found = []
    for settings, one in zip(wanted, said, strict=True):
        (view,) = [view for view in views if settings.items() <= view.run.point.items()]
        found.append(one | dict(tokens=view.tokens, loss=view.validation_loss, bits_per_byte=view.bits_per_byte))
    return found


def fit(runs: Iterable[dict]) -> tuple[law.Law, list[law.Law], np.ndarray]:
    """Return the law of the runs of one kind, the laws of the bootstrap, and the residuals that it drew from."""
    arrays = [np.array([run[name] for run in runs], float) for name in ("n_params", "tokens", "loss")]
    best = law.fit(*arrays)
    return best, law.bootstrap(best, *arrays, N_BOOTSTRAP), law.residuals(best, *arrays)


def predict(file: Path, laws: report.Laws, size: Size, tokens: int) -> dict[str, dict]:
    """Return {kind: loss and 95% interval for new runs}, which is written to `file` before the size is trained.

    An existing file is kept. Raises ExperimentError if it is for another size.
    """
    what = dict(size=str(size), tokens=tokens, kinds=list(laws))
    if not file.exists():
        rng, found = np.random.default_rng(0), {}
        for kind, (best, others, residuals) in laws.items():
            n = contest_of(size).parameters(kind)
            draws = [other(n, tokens) * np.exp(rng.choice(residuals, 20)) for other in others]
            low, high = np.percentile(draws, [2.5, 97.5])
            found[kind] = dict(loss=float(best(n, tokens)), low=float(low), high=float(high))
        write_atomically(file, json.dumps(what | {"predictions": found}, indent=1) + "\n")
    kept = json.loads(file.read_text())
    if wrong := [f"{name} {kept[name]}" for name, value in what.items() if kept[name] != value]:
        raise tools.ExperimentError(f"{file} is for another size ({', '.join(wrong)}): give another --out")
    return kept["predictions"]


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
