"""Train a small model on a probe of recall, and measure its accuracy by the number of items in its context.

    python scripts/recall.py --task=associative --lengths=4,8,16,32 --steps=2000 [--config.model.any=value ...]
    python scripts/recall.py --task=copy --lengths=8,16,32 --test_lengths=8,16,32,64,128 --out=recall/copy
    python scripts/recall.py --task=copy ... --config.model.d_key=32 --out=recall/wide --beside=recall/copy

One model is trained from scratch on all --lengths in turn; heinsen/evaluation/probes.py describes the tasks. Of the
config, model, optimizer, batch_size, log_every and seed are used. Prints a table, and one JSON object on the last line
of stdout; writes that object to OUT/results.json, and OUT/accuracy.png.
"""

import dataclasses
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from absl import app, flags, logging
from jax.sharding import Mesh
from ml_collections import config_flags

from configs import parse_flags, read_config
from heinsen.config import from_mapping
from heinsen.errors import InputError, exit_on_error
from heinsen.evaluation.probes import TASKS, Accuracy, Probe, Task, accuracy, answer_loss, right_answers
from heinsen.files import make_folder, write_atomically, write_figure
from heinsen.models import Params, count_params, init_model_state
from heinsen.parallel import (
    MeshError,
    keep_host_memory,
    make_mesh,
    place_batch,
    replicated,
    split_batch,
)
from heinsen.training.console import Console
from heinsen.training.loop import NonFiniteLossError
from heinsen.training.optimizer import make_optimizer
from heinsen.training.run import TrainConfig
from heinsen.training.step import init_train_state, make_train_step

CONFIG = config_flags.DEFINE_config_file(
    "config",
    str(Path(__file__).resolve().parent.parent / "configs" / "recall.py"),
    "Config file; --config.a.b=value overrides a field.",
)
TASK = flags.DEFINE_enum("task", None, list(TASKS), "What to recall.", required=True)
LENGTHS = flags.DEFINE_list("lengths", ["4", "8", "16", "32"], "Numbers of items in training, in turn.")
TEST_LENGTHS = flags.DEFINE_list("test_lengths", None, "Numbers of items to test; default: those of training.")
STEPS = flags.DEFINE_integer("steps", 2000, "Training steps.", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "Folder of the results; default: recall/TASK.")
BESIDE = flags.DEFINE_list("beside", [], "Folders of other results for the task, to draw in the same plot.")

TEST_SEQUENCES = 256  # of each length

Results = dict[str, Any]  # results.json


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    with exit_on_error(on_interrupt="interrupted; nothing was written"):
        out = Path(OUT.value or f"recall/{TASK.value}")
        try:
            settings = read_settings()
        except ValueError as error:  # a flag's value that the library rejects
            raise InputError(str(error)) from error
        others = [read_results(Path(folder)) for folder in BESIDE.value]
        make_folder(out)
        results = run(settings, out.name)
        print("\n".join([*report(results), json.dumps(results)]))  # even if the files below cannot be written
        write(out, results, others)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to train and test on."""

    config: TrainConfig
    task: Task
    lengths: list[int]
    test_lengths: list[int]
    mesh: Mesh


# ---- settings ------------------------------------------------------------------------------------


def read_settings() -> Settings:
    """Return the checked settings of the flags. Raises HeinsenError and ValueError."""
    config = read_train_config()
    lengths = parse_numbers("lengths", LENGTHS.value)
    test_lengths = parse_numbers("test_lengths", TEST_LENGTHS.value or []) or sorted(set(lengths))
    task = Task(TASK.value, config.model.vocab_size)
    for length in {*lengths, *test_lengths}:
        task.check(length)
    keep_host_memory()
    mesh = make_mesh()
    if config.batch_size % mesh.size:
        raise MeshError(
            f"{config.batch_size} sequences do not divide over {mesh.size} devices: change --config.batch_size"
        )
    return Settings(config, task, lengths, test_lengths, mesh)


def read_train_config() -> TrainConfig:
    """Return the config. Raises ConfigError, and InputError if the run is too short."""
    mapping = read_config(CONFIG)
    if (warmup := mapping["optimizer"]["warmup_steps"]) >= STEPS.value:
        raise InputError(
            f"--steps={STEPS.value}: the warm-up of the learning rate alone takes optimizer.warmup_steps = {warmup}; "
            "give more steps, or a lower --config.optimizer.warmup_steps"
        )
    # As many tokens as the steps take, for the config's own checks; the probe determines the length of a sequence.
    mapping |= {"total_tokens": STEPS.value * mapping["batch_size"], "sequence_length": 1}
    return from_mapping(TrainConfig, mapping)


def parse_numbers(name: str, texts: Sequence[str]) -> list[int]:
    """Return the positive integers of a list flag. Raises InputError."""
    for text in texts:
        if not text.strip().isdecimal() or int(text) < 1:
            raise InputError(f"--{name}: {text!r} is not a number of items; expected e.g. --{name}=4,8,16")
    return [int(text) for text in texts]


def read_results(folder: Path) -> Results:
    """Return the results of an earlier run for the same task. Raises InputError."""
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text())
        task = results["task"]
        results["label"], results["accuracy"][0]["answers"], results["trained_lengths"]  # noqa: B018 (must exist)
    except OSError as error:
        raise InputError(f"--beside={folder}: {path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, LookupError, TypeError) as error:
        raise InputError(f"--beside={folder}: {path} is damaged or no result of this script ({error!r})") from error
    if task != TASK.value:
        raise InputError(f"--beside={folder} holds results for task {task!r}, not {TASK.value!r}")
    return results


# ---- training and testing ------------------------------------------------------------------------


def run(settings: Settings, label: str) -> Results:
    """Train and test."""
    start = time.monotonic()
    params, loss = train(settings, label)
    seconds = time.monotonic() - start
    config, task = settings.config, settings.task
    state = jax.eval_shape(lambda: init_model_state(config.model, 1))
    return dict(
        task=task.name,
        label=label,
        steps=STEPS.value,
        batch_size=config.batch_size,
        trained_lengths=settings.lengths,
        loss=loss,
        chance=task.chance,
        parameters=count_params(params),
        state_numbers=sum(leaf.size for leaf in jax.tree.leaves(state)),
        seconds=seconds,
        accuracy=[dict(length=n, **test(settings, n, params)._asdict()) for n in settings.test_lengths],
        model=dataclasses.asdict(config.model),
    )


def write(out: Path, results: Results, others: Sequence[Results]) -> None:
    """Write results.json, and accuracy.png with other results beside these. Raises OSError."""
    write_atomically(out / "results.json", json.dumps(results) + "\n")
    plot([*others, results], out / "accuracy.png")
    print(f"written: {out / 'results.json'}, {out / 'accuracy.png'}", file=sys.stderr)


def train(settings: Settings, name: str) -> tuple[Params, float]:
    """Return the trained parameters, and the mean loss over the last step of each length."""
    config, lengths = settings.config, settings.lengths
    optimizer = make_optimizer(config.optimizer, STEPS.value)
    state = init_train_state(config.model, optimizer, config.seed, settings.mesh)
    step = make_train_step(config.model, optimizer, settings.mesh, answer_loss)
    console, since, n_tokens, losses = Console(name, 0, STEPS.value, True), time.monotonic(), 0, []
    try:
        for number in range(1, STEPS.value + 1):
            rng = np.random.default_rng([config.seed, 0, number])
            probe = settings.task.draw(rng, config.batch_size, lengths[number % len(lengths)])
            batch = {name: x[None] for name, x in probe._asdict().items()}
            state, metrics = step(state, place_batch(settings.mesh, batch, axis=1))
            losses = [*losses, float(metrics["loss"])][-len(lengths) :]
            n_tokens += probe.answers.size
            console.update(number)
            if not math.isfinite(losses[-1]):
                remedy = "lower --config.optimizer.learning_rate"
                raise NonFiniteLossError(f"the loss is {losses[-1]} at step {number}: {remedy}")
            if number % config.log_every == 0:
                now, rate = time.monotonic(), n_tokens / max(time.monotonic() - since, 1e-9)
                measured = {"loss": float(np.mean(losses)), "grad_norm": float(metrics["grad_norm"])}
                console.report(number, measured | {"tokens_per_second": rate})
                since, n_tokens = now, 0
    finally:
        console.close()
    return state.params, float(np.mean(losses))


def test(settings: Settings, length: int, params: Params) -> Accuracy:
    """Return the accuracy on sequences that training has not seen."""
    config, mesh = settings.config, settings.mesh
    step = jax.jit(
        lambda params, tokens: right_answers(config.model, params, tokens),
        in_shardings=(None, split_batch(mesh)),
        out_shardings=replicated(mesh),
    )
    rng, probes, right = np.random.default_rng([config.seed, 1, length]), [], []
    for _ in range(-(-TEST_SEQUENCES // config.batch_size)):
        probes.append(settings.task.draw(rng, config.batch_size, length))
        right.append(np.asarray(step(params, place_batch(mesh, {"tokens": probes[-1].tokens})["tokens"])))
    return accuracy(Probe(*map(np.concatenate, zip(*probes, strict=True))), np.concatenate(right))


# ---- report --------------------------------------------------------------------------------------


def report(results: Mapping[str, Any]) -> list[str]:
    """Return the lines of the table."""
    lengths = ", ".join(map(str, results["trained_lengths"]))
    lines = [
        f"{results['task']}: {results['parameters']:,} parameters, a state of {results['state_numbers']:,} numbers, "
        f"{results['steps']:,} steps of {results['batch_size']} sequences with {lengths} items; "
        f"last loss {results['loss']:.4f} nats; guessing is right {results['chance']:.2%} of the time",
        f"{'items':>8} {'trained':>8} {'right tokens':>13} {'right answers':>14} {'answers':>8}",
    ]
    for point in results["accuracy"]:
        trained = "yes" if point["length"] in results["trained_lengths"] else "no"
        lines.append(
            f"{point['length']:>8} {trained:>8} {point['tokens']:>13.1%} {point['answers']:>14.1%} "
            f"{point['n_answers']:>8,}"
        )
    return lines


def plot(results: Sequence[Results], path: Path) -> None:
    """Draw the accuracy by the number of items, one curve for each of the results."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for index, result in enumerate(results):
        lengths = [point["length"] for point in result["accuracy"]]
        label = f"{result['label']}, state of {result['state_numbers']:,} numbers"
        tokens, answers = ([point[name] for point in result["accuracy"]] for name in ("tokens", "answers"))
        axes.plot(lengths, answers, "o-", color=f"C{index}", ms=4, lw=1.2, label=label)
        if tokens != answers:
            axes.plot(lengths, tokens, "--", color=f"C{index}", lw=1, label="the same, single tokens")
    axes.axhline(results[-1]["chance"], color="0.5", lw=0.8, ls=":", label="guessing one token")
    axes.axvline(max(results[-1]["trained_lengths"]), color="0.7", lw=0.8, label="longest in training")
    axes.set(title=results[-1]["task"], xlabel="items in the context", ylabel="right answers", ylim=(-0.02, 1.02))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    write_figure(path, figure, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
