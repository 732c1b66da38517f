"""What a conversion keeps of a softmax model, by the features that replace softmax, and by the tokens it takes.

    python experiments/conversion/run.py --corpus=corpus --out=runs/conversion [--cells=1,2] [--minutes=60]
    python experiments/conversion/run.py --report --out=experiments/conversion

CORPUS is what scripts/build_corpus.py builds. The teachers (config.py) train first, on text, recall and copying, and
are kept in OUT/teachers/. A student begins with its teacher's weights. In the first half of its steps its feature maps
and gate learn the teacher's attention, then all weights learn the text and the tasks, as by configs/convert.py. Each
stage has four rates with one seed, more where the best is at the grid's end; three other seeds are tested. Rerun the
same command to resume, at the cell. OUT receives cells/, and the report: report.md, results.json, conversion.png.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "conversion")

import jax
import jax.numpy as jnp
import numpy as np

from experiments import lanes, tools
from experiments.attribution import text
from experiments.conversion import config, mix, report
from experiments.conversion.config import CELLS, TEACHERS, Cell
from experiments.reports import best_rate
from heinsen.config import from_mapping
from heinsen.evaluation.probes import right_answers
from heinsen.export.state_dicts import from_arrays, named_leaves, parameter_names
from heinsen.files import atomic_writer
from heinsen.models import (
    ModelConfig,
    Params,
    abstract_params,
    attention_distances,
    count_params,
    init_params,
    next_token_losses,
    state_size,
)
from heinsen.training.config import TrainConfig
from heinsen.training.conversion import attention_loss, text_loss


class Plan(NamedTuple):
    """How much of everything."""

    cells: tuple[str, ...] = tuple(CELLS)
    teacher_steps: int = config.TEACHER_STEPS
    n_validation: int = 256  # windows of text
    n_tests: int = 1024  # windows of text; a quarter as many sequences of each number of items


SMALL_PLAN = Plan(cells=config.SMALL, teacher_steps=80, n_validation=16, n_tests=64)
N_LANES = 4
STREAM = 16  # windows of a stream
ALL_SEEDS = *config.SEEDS, config.TEACHER_SEED


def measure(
    plan: Plan, corpus: Path, out: Path, minutes: float | None, numbers: Sequence[str] | None
) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises InputError."""
    found = text.load(corpus, out, ALL_SEEDS, config.LENGTH, config.TEXT_ROWS, plan.teacher_steps)
    cells = {name: CELLS[name] for name in plan.cells}
    chosen = cells.values() if numbers is None else [list(cells.values())[int(i) - 1] for i in numbers]
    teachers = {name: Cell({}, 1.0, name, 1, scratch=True) for name in TEACHERS}
    wanted = [str(i) for i, name in enumerate(TEACHERS, 1) if any(cell.teacher == name for cell in chosen)]
    (out / "teachers").mkdir(exist_ok=True)

    def run(cell: Cell, turn: lanes.Turn) -> dict[str, Any]:
        return Measurement(plan, cell, found, out).run(turn)

    taught = lanes.run_cells(teachers, run, out, minutes, wanted)["cells"]
    return dict(
        settings=config.get_config().to_dict(),
        teacher_steps=plan.teacher_steps,
        tests=plan.n_tests,
        n_grams=text.N_GRAMS,
        teachers=taught,
        **lanes.run_cells(cells, run, out, minutes, numbers),
    )


def train_config(fields: Mapping[str, Any], optimizer: str) -> TrainConfig:
    mapping = config.get_config()
    mapping.model.update(fields)
    mapping.optimizer.name = optimizer
    return from_mapping(TrainConfig, mapping.to_dict())


class Measurement:
    """The tuning, training and tests of a cell."""

    def __init__(self, plan: Plan, cell: Cell, found: Mapping[str, np.ndarray], out: Path) -> None:
        self.plan, self.cell, self.text = plan, cell, found
        self.teacher_file = out / "teachers" / tools.cell_file(cell.teacher, out).with_suffix(".npz").name
        self.is_teacher = cell.scratch and not cell.model
        optimizer = "muon" if cell.scratch else "adamw"
        self.config = train_config(TEACHERS[cell.teacher] | dict(cell.model), optimizer)
        self.teacher = train_config(TEACHERS[cell.teacher], optimizer).model
        self.model = self.config.model
        self.n_steps = round(cell.share * plan.teacher_steps / cell.stages)
        self.tuning_steps = min(self.n_steps, plan.teacher_steps // 4)  # of each stage
        self.tuning_seed, *seeds = config.SEEDS
        self.seeds = [config.TEACHER_SEED] if self.is_teacher else seeds

    def run(self, turn: lanes.Turn) -> dict[str, Any]:
        """Return what results.json holds of the cell."""
        begin = time.monotonic()
        of_text = self.compile(text_loss)
        of_attention = None
        if self.cell.stages == 2:
            added = frozenset(parameter_names(self.model)) - {*parameter_names(self.teacher)}
            of_attention = self.compile(partial(attention_loss, self.teacher), added)
        read = compile_readers(self.model, self.teacher if of_attention else None)
        compiled = time.monotonic()
        with turn:
            began = time.monotonic()
            first_params = None if self.cell.scratch else self.initial_params([self.tuning_seed] * N_LANES)
            params = None if self.cell.scratch else self.initial_params(self.seeds)
            tuning, distances = {}, None
            if of_attention:
                score = lambda params: self.over_lanes(read.distance, params)
                losses, best = self.tune(of_attention, config.ATTENTION_RATES, 0, score, first_params)
                first_params = repeat(best)
                params = self.train(of_attention, best_rate(losses), 0, params)
                distances = score(params)[: len(self.seeds)].tolist()
                tuning["attention"] = losses
            first = 0 if of_attention is None else self.n_steps
            rates = config.TEACHER_RATES if self.cell.scratch else config.TEXT_RATES
            score = lambda params: self.over_lanes(read.loss, params)
            tuning["text"], _ = self.tune(of_text, rates, first, score, first_params)
            params = self.train(of_text, best_rate(tuning["text"]), first, params)
            tested = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(len(self.seeds))]
            if self.is_teacher:
                self.save(tested[0])
            runs = [read.test(each, self.text, self.plan.n_tests) for each in tested]
            seconds = time.monotonic() - began
        return dict(
            summary=f"{np.mean([each['text'] for each in runs]):.3f} bits per byte, recall "
            f"{np.mean([list(each['associative'].values()) for each in runs]):.1%}, copying "
            f"{np.mean([list(each['copy'].values()) for each in runs]):.1%}; compiled in {compiled - begin:.0f} s, ran "
            f"{seconds:.0f} s",
            **self.cell._asdict(),
            steps=self.n_steps * self.cell.stages,
            parameters=count_params(abstract_params(self.model)),
            state_numbers=state_size(self.model, config.LENGTH),
            tuning={stage: {f"{rate:g}": x for rate, x in sorted(losses.items())} for stage, losses in tuning.items()},
            distances=distances,
            seconds=seconds,
            seeds=list(self.seeds),
            runs=runs,
        )

    def compile(self, loss: Callable[..., Any], trained: frozenset[str] | None = None) -> lanes.Lanes:
        return lanes.Lanes.compile(self.config, N_LANES, [self.batch_of(self.tuning_seed)(0)], loss, trained)

    def batch_of(self, *seeds: int) -> Callable[[int], dict[str, np.ndarray]]:
        """The batches of a step for these seeds, the last one's in the lanes that are left."""
        of_lanes = [*seeds, *seeds[-1:] * (N_LANES - len(seeds))]
        draw = lambda step: [
            mix.draw_batch(self.text["train"][seed, step].astype(np.int32), seed, step, self.cell.window_starts)
            for seed in of_lanes
        ]
        return lambda step: jax.tree.map(lambda *x: np.stack(x), *draw(step))

    def initial_params(self, seeds: Sequence[int]) -> Params:
        """The teacher's weights, and what it lacks drawn with each seed, of all lanes."""
        with np.load(self.teacher_file) as loaded:
            own = dict(loaded)

        def draw(seed: int) -> Params:
            drawn = dict(named_leaves(init_params(self.model, jax.random.key(seed))))
            return from_arrays(self.model, drawn | own)

        drawn = [draw(seed) for seed in [*seeds, *seeds[-1:] * (N_LANES - len(seeds))]]
        return jax.tree.map(lambda *x: jnp.stack(x), *drawn)

    def save(self, params: Params) -> None:
        with atomic_writer(self.teacher_file) as file:
            np.savez_compressed(file, **{name: np.asarray(x) for name, x in named_leaves(params)})

    def tune(
        self, programs: lanes.Lanes, rates: Sequence[float], first: int, score: Any, params: Params | None
    ) -> tuple[dict[float, float], Params]:
        """`Lanes.tune` on the batches from step `first` on."""
        batch_of = self.batch_of(self.tuning_seed)
        return programs.tune(rates, self.tuning_seed, lambda i: batch_of(first + i), self.tuning_steps, score, params)

    def train(self, programs: lanes.Lanes, rate: float, first: int, params: Params | None) -> Params:
        batch_of = self.batch_of(*self.seeds)
        rates = [rate] * len(self.seeds)
        return programs.train(self.seeds, rates, lambda i: batch_of(first + i), self.n_steps, params)[0]

    def over_lanes(self, read: Callable[[Params, dict[str, np.ndarray]], Any], params: Params) -> np.ndarray:
        """The mean over validation batches of what is read of each lane's parameters, [L]."""
        n = -(-self.plan.n_validation // config.TEXT_ROWS)
        windows = self.text["validation"][: n * config.TEXT_ROWS].astype(np.int32)
        drawn = [
            mix.draw_batch(rows, config.VALIDATION_SEED, i, self.cell.window_starts)
            for i, rows in enumerate(np.split(windows, n))
        ]
        lane = lambda i: jax.tree.map(lambda x: x[i], params)
        return np.array([np.mean([read(lane(i), each) for each in drawn]) for i in range(N_LANES)])


def repeat(params: Params) -> Params:
    return jax.tree.map(lambda x: jnp.stack([x] * N_LANES), params)


class Readers(NamedTuple):
    """Jitted functions of one model's parameters."""

    loss: Callable[..., Any]  # (parameters, batch) -> nats per token
    distance: Callable[..., Any]  # (parameters, batch) -> the mean distance of its layers from the teacher
    losses: Callable[..., Any]  # (parameters, tokens [B, N]) -> nats [B, T]
    right: Callable[..., Any]  # (parameters, a probe's batch) -> the share of right answers

    def test(self, params: Params, found: Mapping[str, np.ndarray], n_tests: int) -> dict[str, Any]:
        """Return bits per byte of text, of bytes that repeat their context, and of streams; right answers of tasks."""
        windows, lengths = found["test"].astype(np.int32), found["test_lengths"]
        whole = int(np.argmin(np.append(lengths == config.LENGTH, False)))  # windows before the first short one
        n = min(whole, n_tests) // STREAM * STREAM
        read = lambda tokens: np.asarray(self.losses(params, tokens)) / np.log(2)
        bits = np.concatenate([read(each) for each in np.split(windows[:n], n // STREAM)])
        recalled = found["recalled"][:, : bits.size].reshape(-1, *bits.shape)
        streams = windows[:n].reshape(n // STREAM, STREAM, -1)
        joined = np.concatenate([streams[:, 0, :1], streams[:, :, 1:].reshape(len(streams), -1)], axis=1)
        beyond = np.concatenate([read(each[None])[:, config.LENGTH :] for each in joined])
        tests = mix.draw_tests(max(1, n_tests // 4))
        return dict(
            text=float(bits.mean()),
            repeated=[float(bits[each].mean()) if each.any() else math.nan for each in recalled],
            streams=float(beyond.mean()),
        ) | {
            name: {n: float(self.right(params, batch)) for n, batch in batches.items()}
            for name, batches in tests.items()
        }


def compile_readers(model: ModelConfig, teacher: ModelConfig | None) -> Readers:
    distance = lambda params, batch: jnp.mean(
        attention_distances(model, teacher, params, batch["tokens"][:, :-1], None, batch["first_place"])
    )
    return Readers(
        jax.jit(lambda params, batch: text_loss(model, params, batch, None)),
        jax.jit(distance),
        jax.jit(lambda params, tokens: next_token_losses(model, params, tokens)),
        jax.jit(lambda params, batch: jnp.mean(right_answers(model, params, batch))),
    )


if __name__ == "__main__":
    tools.run_experiment(measure, Plan(), SMALL_PLAN, report)
