"""Models that differ in a few fields, compared in one frame: tuned alike, trained alike, tested on the same text.

Each is tuned over one grid of learning rates, which is extended where the best lies at its end, then trained with
several seeds, and tested on a whole split.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments import tools
from heinsen.config import from_mapping
from heinsen.figures import place_legend
from heinsen.models import init_model_state
from heinsen.sweep.runs import RunView, best_of
from heinsen.sweep.space import SEED, Value
from heinsen.training.config import TrainConfig
from heinsen.training.metrics import read_metrics

RATE = "optimizer.learning_rate"
_MOST_EXTENSIONS = 2  # of the grid of learning rates

Trained = Mapping[Path, Sequence[RunView]]  # {folder of a sweep: its runs}
Bits = Mapping[str, Mapping[int, float]]  # {contestant: {seed: bits per byte}}
Tuning = Mapping[str, Mapping[float, float]]  # {contestant: {learning rate: validation loss}}; infinite: crashed


@dataclasses.dataclass(frozen=True)
class Contest:
    """A set of contestants and the config that they share.

    Attributes:
      config: the config file of all contestants.
      get_config: its function.
      contestants: {name: the fields of the model in which it differs from the config}.
    """

    config: Path
    get_config: Callable[[], ConfigDict]
    contestants: Mapping[str, Mapping[str, Value]]

    def fields(self, name: str) -> dict[str, Value]:
        """Return the values of all fields in which contestants differ."""
        varied = {field: None for each in self.contestants.values() for field in each}
        model = self.get_config().model
        return {f"model.{field}": self.contestants[name].get(field, model[field]) for field in varied}

    def train_config(self, name: str) -> TrainConfig:
        """Return the config of a contestant's runs."""
        mapping = self.get_config()
        mapping.model.update(self.contestants[name])
        return from_mapping(TrainConfig, mapping.to_dict())

    def runs_of(self, name: str, runs: Iterable[RunView]) -> list[RunView]:
        """Return a contestant's runs."""
        fields = self.fields(name).items()
        return [run for run in runs if fields <= run.run.point.items()]

    # ---- training ----

    def tune(
        self, out: Path, names: Collection[str], rates: Sequence[float], parallel: int, *options: str
    ) -> list[RunView]:
        """Return the runs of some contestants on the grid, and on its extensions. Sweeps out/tuning, out/tuning_1, ...

        A contestant whose best rate is at an end of the grid gets a rate half or twice as large, and then another one.
        """
        wanted = [self.fields(name) | {RATE: rate} for name in names for rate in rates]
        tuning = tools.run_sweep(self.config, out / "tuning", wanted, parallel, *options, may_crash=True)
        for extension in range(1, _MOST_EXTENSIONS + 1):
            beyond = []
            for name in names:
                tried, best = list(self.losses(name, tuning)), self.best_rate(name, tuning)
                if len(tried) > 1 and best in (min(tried), max(tried)):
                    beyond.append(self.fields(name) | {RATE: best / 2 if best == min(tried) else best * 2})
            if beyond:
                folder = out / f"tuning_{extension}"
                tuning += tools.run_sweep(self.config, folder, beyond, parallel, *options, may_crash=True)
        return tuning

    def losses(self, name: str, tuning: Sequence[RunView]) -> dict[float, float]:
        """Return a contestant's last validation loss by learning rate, infinite for crashed runs."""
        loss = lambda run: run.validation_loss if run.state == "finished" else math.inf
        return dict(sorted((run.run.point[RATE], loss(run)) for run in self.runs_of(name, tuning)))

    def best_rate(self, name: str, tuning: Sequence[RunView]) -> float:
        """Return the learning rate with the lowest validation loss. Raises ExperimentError."""
        best = best_of(self.runs_of(name, tuning))
        if best is None:
            raise tools.ExperimentError(
                f"{name} has crashed at all learning rates: give lower --learning_rates, and another --out"
            )
        return best.run.point[RATE]

    def train(
        self, folder: Path, names: Iterable[str], tuning: Sequence[RunView], parallel: int, *options: str
    ) -> list[RunView]:
        """Return the runs of some contestants at their best learning rates: a sweep in `folder`."""
        wanted = [self.fields(name) | {RATE: self.best_rate(name, tuning)} for name in names]
        return tools.run_sweep(self.config, folder, wanted, parallel, *options)

    # ---- results ----

    def bits(self, names: Iterable[str], final: Sequence[RunView], tested: Mapping[str, dict]) -> dict:
        """Return `Bits` from {run: summary of eval.py}."""
        return {
            name: {run.run.point[SEED]: tested[run.name]["bits_per_byte"] for run in self.runs_of(name, final)}
            for name in names
        }

    def by_source(
        self, names: Iterable[str], final: Sequence[RunView], tested: Mapping[str, dict]
    ) -> dict[str, dict[str, float]]:
        """Return {source: {contestant: bits per byte, mean over seeds}}, the largest source first."""
        found: dict[str, dict[str, float]] = {}
        sizes: dict[str, int] = {}
        for name in names:
            runs = [tested[run.name].get("sources", {}) for run in self.runs_of(name, final)]
            for source in runs[0]:
                sizes[source] = runs[0][source]["tokens"]
                found.setdefault(source, {})[name] = statistics.fmean(run[source]["bits_per_byte"] for run in runs)
        return {source: found[source] for source in sorted(found, key=lambda source: -sizes[source])}

    def parameters(self, name: str) -> int:
        """Return the number of parameters of a contestant."""
        return tools.n_params(self.train_config(name))

    def train_flops(self, names: Iterable[str], tokens: int | None = None) -> float:
        """Return the FLOPs of one run of each of some contestants, on the config's tokens by default."""
        return sum(tools.train_flops(self.train_config(name), tokens) for name in names)

    def state_size(self, name: str, n_tokens: int) -> int:
        """Return how many numbers the states of all layers have after so many tokens."""
        model = self.train_config(name).model
        state = jax.eval_shape(lambda: init_model_state(model, 1, n_tokens))
        return sum(leaf.size for leaf in jax.tree.leaves((state.attention, state.convolution)))

    def plot_curves(self, path: Path, names: Iterable[str], trained: Trained) -> None:
        """Draw validation by training bytes: the mean over seeds, in a band from the lowest to the highest."""
        figure, axes = tools.make_figure(figsize=(8, 5))
        for index, name in enumerate(names):
            logs = [
                read_metrics(folder / run.name) for folder, runs in trained.items() for run in self.runs_of(name, runs)
            ]
            points = [
                [(e["tokens"], e["validation_bits_per_byte"]) for e in log if "validation_loss" in e] for log in logs
            ]
            tokens, values = np.array([x for x, _ in points[0]]), np.array([[y for _, y in one] for one in points])
            style = dict(color=f"C{index % 10}", ls="-" if index < 10 else "--")
            axes.plot(tokens / 1e6, values.mean(0), marker="o", ms=3, lw=1.2, label=name, **style)
            axes.fill_between(tokens / 1e6, values.min(0), values.max(0), color=style["color"], alpha=0.2, lw=0)
        axes.set(xlabel="million bytes of training", ylabel="validation (bits per byte)", yscale="log")
        axes.yaxis.set_major_formatter("{x:.1f}")
        axes.yaxis.set_minor_formatter("{x:.1f}")
        axes.grid(alpha=0.3, which="both")
        place_legend(figure)
        tools.save_figure(figure, path)


def test(
    out: Path,
    trained: Trained,
    parallel: int,
    by_position: bool = False,
    split_of: Callable[[RunView], str] = lambda run: "test",
) -> dict[str, dict]:
    """Return {run: summary of eval.py on its split}.

    Results are kept in out/RUN.json, and the plot of the loss by position, if wanted, in out/RUN.png.
    """
    files = {run.name: out / f"{run.name}.json" for runs in trained.values() for run in runs}
    commands = {}
    for folder, runs in trained.items():
        for run in runs:
            options = [f"--by_position={tools.from_root(out / run.name)}.png"] if by_position else []
            workdir = f"--workdir={tools.from_root(folder / run.name)}"
            commands[files[run.name]] = ["eval.py", workdir, f"--split={split_of(run)}", *options]
    found = tools.run_programs(commands, parallel)
    return {name: found[file] for name, file in files.items()}


def common_rate(tuning: Tuning) -> float:
    """Return the learning rate with the lowest loss on average over the contestants. Raises ExperimentError."""
    rates = set.intersection(*(set(losses) for losses in tuning.values()))
    means = {rate: statistics.fmean(losses[rate] for losses in tuning.values()) for rate in sorted(rates)}
    if not means or math.isinf(min(means.values())):
        raise tools.ExperimentError(
            f"{', '.join(tuning)}: one of them has crashed at each learning rate: give lower --learning_rates, and "
            "another --out"
        )
    return best_rate(means)


# ---- words ----------------------------------------------------------------------------------------


def versus(bits: Bits, name: str, first: str) -> str:
    """Return how far one is above another, by the differences between runs with the same seed (Student's t)."""
    from scipy.stats import t

    differences = [bits[name][seed] - bits[first][seed] for seed in bits[name].keys() & bits[first].keys()]
    mean = statistics.fmean(differences)
    text = f"{mean:+.4f}"
    if len(differences) > 1:
        half = t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
        text += f" [{mean - half:+.4f}, {mean + half:+.4f}]"
    return text


def spread(seeds: Mapping[int, float]) -> str:
    """Return the mean over seeds, and their standard deviation."""
    deviation = f" +- {statistics.stdev(seeds.values()):.4f}" if len(seeds) > 1 else ""
    return f"{statistics.fmean(seeds.values()):.4f}{deviation}"


def ranked(bits: Bits) -> list[str]:
    """Return the contestants, that with the lowest mean first."""
    return sorted(bits, key=lambda name: statistics.fmean(bits[name].values()))


def close_together(bits: Bits) -> list[str]:
    """Return those whose ranges over seeds touch that of a neighbor in the ranking; none with one seed each."""
    names = [name for name in ranked(bits) if len(bits[name]) > 1]
    touching = [
        pair for pair in itertools.pairwise(names) if max(bits[pair[0]].values()) >= min(bits[pair[1]].values())
    ]
    return [name for name in bits if any(name in pair for pair in touching)]


def best_rate(losses: Mapping[float, float]) -> float:
    """Return the learning rate with the lowest loss."""
    return min(losses, key=losses.__getitem__)


def tuning_section(tuning: Tuning, title: str = "Tuning", runs: str = "shorter runs") -> list[str]:
    """Return the section of a report on the tuning by such runs."""
    at_end = [name for name, losses in tuning.items() if best_rate(losses) in (min(losses), max(losses))]
    note = f" At the end of the grid: {', '.join(at_end)}." if at_end else ""
    rates = sorted({rate for losses in tuning.values() for rate in losses})
    mark_best = lambda x, losses: f"**{x:.4f}**" if x == min(losses.values()) else f"{x:.4f}"  # inf: crashed
    cell = lambda x, losses: "" if x is None else mark_best(x, losses)
    rows = [[name, *(cell(losses.get(rate), losses) for rate in rates)] for name, losses in tuning.items()]
    return [
        f"## {title}",
        "",
        f"Validation loss in nats per token of {runs} with one seed, by learning rate.{note}",
        "",
        *tools.table(["", *(f"{rate:g}" for rate in rates)], rows),
        "",
    ]


def sources_section(sources: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the section of a report on the sources of the text."""
    names = list(next(iter(sources.values()), {}))
    rows = [
        [source, *(f"**{x:.3f}**" if x == min(bits.values()) else f"{x:.3f}" for x in bits.values())]
        for source, bits in sources.items()
    ]
    return [
        "## Sources",
        "",
        "Bits per byte by source, mean over seeds; the lowest of each in bold.",
        "",
        *tools.table(["", *names], rows),
        "",
    ]
