"""A scaling ladder of the paper's, gated and softmax attention: fit L(N, D), predict the next size, then train it.

    python experiments/ladder/run.py --corpus=corpus --out=runs/ladder [--parallel=2]
    python experiments/ladder/run.py --report --out=experiments/ladder

CORPUS is what scripts/build_corpus.py builds. Rerun the same command to resume. Sizes are layers x width of the paper's
model, with heads of 32. Budgets are numbers of bytes for the largest size; smaller ones take less, as the root of their
parameters, which tells the law more than equal numbers do. Learning rates are tuned at two sizes; those of the others
lie on the power of the width between them, which is checked at a third size. The prediction for the next size is
written before it is trained (prediction.json). OUT receives data/, the sweeps tuning/SIZE/, checked/, ladder/ and
next/, and the report: report.md, results.json, ladder.png. --report writes the report of a results.json again. Other
sizes and budgets: the plan below.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags
from heinsen.files import write_atomically

define_flags(__name__, "ladder")

import numpy as np

from experiments import tools
from experiments.ladder import config, report
from experiments.reports import Losses, best_rate
from experiments.scaling import law
from experiments.tools import RATE, Contest
from heinsen.sweep.runs import RunView
from heinsen.sweep.space import Value

# Beyond the runs: (parameters, bytes). The last two are what a softmax GPT (Poli et al. 2023, arXiv:2302.10866, 2.416
# nats per GPT-2 token) and the paper's model (2.47) were trained on.
_FROM_GPT2 = 1 / report.TOKENS_PER_BYTE
FARTHER = [(2e6, 8e6), (16e6, 64e6), (125e6, 5e8), (125e6, 15e9 * _FROM_GPT2), (125e6, 300e9 * _FROM_GPT2)]

Laws = Mapping[str, tuple[law.Law, list[law.Law], np.ndarray]]  # {kind: (law, laws of the bootstrap, residuals)}

# ---- models: every kind at any size, with as many parameters as the paper's within 1% ---------------

HEAD = 32  # key and value features of a head

# The parts that helped the gated model most in experiments/forgetting; softmax attention as it is used most.
KINDS: dict[str, dict[str, Value]] = {
    "paper's": {},
    "gate, parts": dict(gate="head", output_gate=True, convolution=4, position="none"),
    "softmax": dict(attention="softmax", block="gpt2", position="rotary"),
}


class Size(NamedTuple):
    """Layers and width of the paper's model; the other kinds have as many parameters."""

    n_layers: int
    width: int

    def __str__(self) -> str:
        return f"{self.n_layers}x{self.width}"


@functools.cache
def contest_of(size: Size) -> Contest:
    """Return the contest of all kinds at a size."""
    return Contest(config, {kind: fields_of(kind, size) for kind in KINDS})


@functools.cache
def paper_params(size: Size) -> int:
    """Return the number of parameters of the paper's model."""
    return contest_of(size).parameters("paper's")


def fields_of(kind: str, size: Size) -> Mapping[str, Value]:
    """Return the fields of the model; two layers of the paper's block have as many parameters as one of GPT-2's."""
    heads: dict[str, Value] = dict(n_heads=size.width // HEAD, d_key=HEAD, d_value=HEAD)
    paper = dict(n_layers=size.n_layers) | heads | dict(d_model=size.width)
    if kind == "paper's":
        return paper
    n_layers = size.n_layers // 2 if KINDS[kind].get("block") == "gpt2" else size.n_layers
    fields = KINDS[kind] | dict(n_layers=n_layers) | heads
    return fields | dict(d_model=_width_for(_count(paper), fields, size.width))


def _width_for(n: int, fields: Mapping[str, Value], near: int) -> int:
    """Return the width with which a model has closest to `n` parameters, up to twice a width that is `near`."""
    tried = near // 2, near, 2 * near
    counts = [_count({**fields, "d_model": width}) for width in tried]
    widths = np.arange(1, 2 * near)
    count = np.polynomial.Polynomial.fit(tried, counts, deg=2)  # the models' matrices are at most width x width
    return int(widths[np.argmin(abs(count(widths) - n))])


def _count(fields: Mapping[str, Value]) -> int:
    return Contest(config, {"": fields}).parameters("")


# ---- the plan ---------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """What to train: sizes of rising numbers of parameters at each budget, then the next size at the largest one.

    tuned: the two sizes, of different width, where the rates are tried; checked: the one where the rule is checked.
    """

    sizes: tuple[Size, ...] = (Size(4, 64), Size(4, 96), Size(4, 128), Size(6, 128), Size(6, 160), Size(8, 192))
    budgets: tuple[int, ...] = (1_500_000, 6_000_000)
    next: Size = Size(12, 224)
    rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2)
    tuned: tuple[Size, Size] = (Size(4, 64), Size(6, 160))
    checked: Size = Size(4, 128)
    n_bootstrap: int = 100

    def tokens_of(self, size: Size, budget: int) -> int:
        """Return the tokens of a size: the budget is that of the largest of `sizes`."""
        return round(budget * math.sqrt(paper_params(size) / paper_params(self.sizes[-1])))


SMALL_PLAN = Plan(
    sizes=(Size(2, 32), Size(2, 64), Size(4, 64)),
    budgets=(350_000, 700_000),
    next=Size(4, 96),
    rates=(3e-3,),
    tuned=(Size(2, 32), Size(4, 64)),
    checked=Size(2, 64),
)


class Rule(NamedTuple):
    """Learning rates: a power of the width for each kind, through the best ones of two sizes.

    tuning: {size: {kind: losses}}.
    """

    tuning: Mapping[Size, Mapping[str, Losses]]

    def rate(self, kind: str, size: Size) -> float:
        """Return a learning rate with three digits."""
        first = next(iter(self.tuning))
        rate = best_between(self.tuning[first][kind]) * (size.width / first.width) ** self.power(kind)
        return float(f"{rate:.3g}")

    def power(self, kind: str) -> float:
        """Return p, where the learning rate is proportional to width^p."""
        (narrow, low), (wide, high) = ((size.width, best_between(each[kind])) for size, each in self.tuning.items())
        return math.log(high / low) / math.log(wide / narrow)


def best_between(losses: Losses) -> float:
    """Return the learning rate at the vertex of the parabola, in its logarithm, through the best one and those beside.

    At an end of the grid, and beside a crashed run, it is the best one itself.
    """
    rates, best = sorted(losses), best_rate(losses)
    around = rates[max(rates.index(best) - 1, 0) : rates.index(best) + 2]
    if len(around) < 3 or any(losses[rate] is None for rate in around):
        return best
    a, b, _ = np.polyfit(np.log(around), [losses[rate] for rate in around], 2)
    return math.exp(-b / (2 * a)) if a > 0 else best


def measure(plan: Plan, corpus: Path, out: Path, parallel: int) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises ExperimentError."""
    tools.prepare_bytes(corpus, out / "data")
    data = f"--config.data.path={tools.from_root(out / 'data')}"
    tokens = lambda size: f"--config.total_tokens={plan.tokens_of(size, min(plan.budgets))}"
    tuned = {
        size: contest_of(size).tune(out / "tuning" / str(size), plan.rates, parallel, data, tokens(size))
        for size in plan.tuned
    }
    rule = Rule({size: losses_of(size, views) for size, views in tuned.items()})

    contest, rates = contest_of(plan.checked), {kind: rule.rate(kind, plan.checked) for kind in KINDS}
    wanted = [contest.fields(kind) | {RATE: rate * factor} for kind, rate in rates.items() for factor in (0.5, 1, 2)]
    options = data, tokens(plan.checked)
    checked = tools.run_sweep(config.__file__, out / "checked", wanted, parallel, *options, may_crash=True)

    runs = train(plan, rule, out / "ladder", plan.sizes, plan.budgets, parallel, data)
    laws = {kind: fit([run for run in runs if run["kind"] == kind], plan.n_bootstrap) for kind in KINDS}
    most = max(plan.budgets)
    prediction = predict(out / "prediction.json", laws, plan.next, plan.tokens_of(plan.next, most))
    last = train(plan, rule, out / "next", [plan.next], [most], parallel, data)
    stages = [*(("tuning", size, views) for size, views in tuned.items()), ("checked", plan.checked, checked)]
    return dict(
        settings=config.get_config().to_dict(),
        runs=[run | dict(expected=float(laws[run["kind"]][0](run["n_params"], run["tokens"]))) for run in runs],
        laws={kind: coefficients(best, others) for kind, (best, others, _) in laws.items()},
        bootstrap={kind: [dataclasses.astuple(x) for x in (best, *others)] for kind, (best, others, _) in laws.items()},
        residuals={kind: float(np.std(residuals)) for kind, (_, _, residuals) in laws.items()},
        predicted=dict(size=str(plan.next), tokens=plan.tokens_of(plan.next, most)),
        prediction=prediction,
        next=last,
        tuning={str(size): losses for size, losses in rule.tuning.items()},
        powers={kind: rule.power(kind) for kind in KINDS},
        checked={str(plan.checked): losses_of(plan.checked, checked)},
        farther=[dict(n_params=n, tokens=d) | {"kinds": extrapolate(laws, n, d)} for n, d in FARTHER],
        logs=[
            dict(stage=stage, kind=kind, size=str(size)) | tools.describe_run(view)
            for stage, size, views in stages
            for kind in KINDS
            for view in contest_of(size).runs_of(kind, views)
        ],
    )


def losses_of(size: Size, views: Sequence[RunView]) -> dict[str, Losses]:
    return {kind: contest_of(size).losses(kind, views) for kind in KINDS}


def train(
    plan: Plan, rule: Rule, out: Path, sizes: Sequence[Size], budgets: Sequence[int], parallel: int, data: str
) -> list[dict[str, Any]]:
    """Return what results.json has of a run of each kind, size and budget, the smallest budget first."""
    points = [(kind, size, budget) for budget in sorted(budgets) for size in sizes for kind in KINDS]
    wanted = [
        contest_of(size).fields(kind) | {"total_tokens": plan.tokens_of(size, budget), RATE: rule.rate(kind, size)}
        for kind, size, budget in points
    ]
    views = tools.run_sweep(config.__file__, out, wanted, parallel, data)
    found = []
    for (kind, size, budget), fields in zip(points, wanted, strict=True):
        (view,) = [view for view in views if fields.items() <= view.run.point.items()]
        n_params = contest_of(size).parameters(kind)
        run = dict(kind=kind, size=str(size), n_params=n_params, budget=budget) | tools.describe_run(view)
        found.append(run | dict(loss=view.validation_loss, bits_per_byte=view.bits_per_byte))
    return found


# ---- laws -----------------------------------------------------------------------------------------


def fit(runs: Iterable[dict], n_bootstrap: int) -> tuple[law.Law, list[law.Law], np.ndarray]:
    """Return the law of the runs of one kind, the laws of the bootstrap, and the residuals that it drew from."""
    arrays = [np.array([run[name] for run in runs], float) for name in ("n_params", "tokens", "loss")]
    best = law.fit(*arrays)
    return best, law.bootstrap(best, *arrays, n_bootstrap), law.residuals(best, *arrays)


def predict(file: Path, laws: Laws, size: Size, tokens: int) -> dict[str, dict[str, float]]:
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


def extrapolate(laws: Laws, n_params: float, tokens: float) -> dict[str, dict[str, list[float]]]:
    """Return {kind: its loss and the difference to softmax's, each with its 95% interval}."""
    losses = {
        kind: np.array([float(law(n_params, tokens)) for law in (best, *others)])
        for kind, (best, others, _) in laws.items()
    }
    bounds = lambda x: [float(x[0]), *np.percentile(x[1:], [2.5, 97.5]).tolist()]
    return {kind: dict(loss=bounds(x), above=bounds(x - losses[report.SOFTMAX])) for kind, x in losses.items()}


def coefficients(best: law.Law, others: list[law.Law]) -> dict[str, list[float]]:
    """Return {coefficient: [value, low, high]} with 95% intervals of the bootstrap."""
    rows = np.array([dataclasses.astuple(law) for law in others])
    low, high = np.percentile(rows, [2.5, 97.5], axis=0)
    names = [field.name for field in dataclasses.fields(law.Law)]
    values = zip(dataclasses.astuple(best), low.tolist(), high.tolist(), strict=True)
    found = {name: list(each) for name, each in zip(names, values, strict=True)}
    found["E"] = [math.exp(x) for x in found.pop("log_e")]
    return found


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
