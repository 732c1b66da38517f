"""Train a small model on a probe of recall, and measure its accuracy by the number of items in its context.

    python scripts/recall.py --task=associative --lengths=4,8,16,32 --steps=2000 [--config.model.any=value ...]
    python scripts/recall.py --task=copy --lengths=8,16,32 --test_lengths=8,16,32,64,128 --out=runs/recall/copy

One model is trained from scratch on all --lengths in turn; heinsen/evaluation/probes.py describes the tasks. Of the
config, model, optimizer, batch_size, log_every, checkpoint_every and seed are used. Prints a table, and one JSON object
on the last line of stdout; writes that object to OUT/results.json, and OUT/accuracy.png.

--seeds=3 trains three models, with the config's seed and the next ones; the object then has each of them in "runs".
--texts=FILE.jsonl trains nothing: it writes --documents sequences of the task in ASCII characters, to be mixed with
text by scripts/prepare_data.py for a model of bytes, which scripts/compare_runs.py tests.
Models are saved every --config.checkpoint_every steps: rerun the same command to resume.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from heinsen.config import from_mapping, read_json_object
from heinsen.errors import InputError, exit_on_error
from heinsen.figures import make_figure, save_figure
from heinsen.files import make_folder, write_atomically
from scripts.cli import parse_counts, parse_flags, read_config, show_help

CONFIG = flags.DEFINE_string(
    "config",
    str(Path(__file__).resolve().parent.parent / "configs" / "recall.py"),
    "Config file; --config.a.b=value overrides a field.",
)
TASK = flags.DEFINE_string("task", None, "What to recall: associative, phonebook, copy or mqar.", required=True)
LENGTHS = flags.DEFINE_list("lengths", ["4", "8", "16", "32"], "Numbers of items in training, in turn.")
TEST_LENGTHS = flags.DEFINE_list("test_lengths", None, "Numbers of items to test; default: those of training.")
STEPS = flags.DEFINE_integer("steps", 2000, "Training steps.", lower_bound=1)
SEEDS = flags.DEFINE_integer("seeds", 1, "Number of models, which differ in their seed.", lower_bound=1)
TEXTS = flags.DEFINE_string("texts", None, "File to write sequences to, as documents, instead of training.")
DOCUMENTS = flags.DEFINE_integer("documents", 60_000, "Number of documents in --texts.", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "Folder of the results; default: runs/recall/TASK.")

show_help(__name__)

import numpy as np
from jax.sharding import Mesh

from heinsen.evaluation.probes import ASCII, Task, answer_loss, make_tester, write_texts
from heinsen.host import keep_compilations, keep_host_memory
from heinsen.models import Params, count_params, state_size
from heinsen.parallel import MeshError, make_mesh, place_batch
from heinsen.training.checkpoint import Checkpoint, Checkpoints
from heinsen.training.config import TrainConfig
from heinsen.training.log import Console
from heinsen.training.loop import NonFiniteLossError
from heinsen.training.optimizer import make_optimizer
from heinsen.training.step import abstract_train_state, init_train_state, make_train_step

TEST_SEQUENCES = 256  # of each length
_TRAIN, _TEST = 0, 1  # parts of seeds: the two draw different sequences


def main(argv: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    with exit_on_error(on_interrupt="interrupted; rerun the same command to resume"):
        out = Path(OUT.value or f"runs/recall/{TASK.value}")
        config = read_train_config()
        lengths = parse_counts("lengths", LENGTHS.value)
        if TEXTS.value is not None:
            write_texts(Task(TASK.value, ASCII), lengths, DOCUMENTS.value, config.seed, Path(TEXTS.value))
            return
        test_lengths = parse_counts("test_lengths", TEST_LENGTHS.value or []) or sorted(set(lengths))
        task = Task(TASK.value, config.model.vocab_size)
        for length in {*lengths, *test_lengths}:
            task.check(length)
        mesh = choose_mesh(config)
        make_folder(out)
        configs = [dataclasses.replace(config, seed=config.seed + i) for i in range(SEEDS.value)]
        check_folder(out, {find_fingerprint(each, task, lengths) for each in configs})
        runs = [run(each, task, lengths, test_lengths, mesh, out) for each in configs]
        results = runs[0] if len(runs) == 1 else {"runs": runs}
        # Even if the files below cannot be written.
        print("\n".join([*(line for each in runs for line in format_results(each)), json.dumps(results)]))
        write_atomically(out / "results.json", json.dumps(results) + "\n")
        plot(runs, out / "accuracy.png")
        for each in configs:
            shutil.rmtree(checkpoints_of(out) / find_fingerprint(each, task, lengths))
        with contextlib.suppress(OSError):  # others are another command's
            checkpoints_of(out).rmdir()
        print(f"written: {out / 'results.json'}, {out / 'accuracy.png'}", file=sys.stderr)


def check_folder(out: Path, fingerprints: Set[str]) -> None:
    """Raise InputError if the folder has the results of other models, which would be lost."""
    if not (path := out / "results.json").exists():
        return
    before = read_json_object(path)
    if {each.get("fingerprint") for each in before.get("runs", [before])} - fingerprints:
        raise InputError(
            f"{path} has results of another model, task, training or seed: give another --out, or remove it"
        )


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


def choose_mesh(config: TrainConfig) -> Mesh:
    """Return a mesh of all devices. Raises MeshError where they do not divide a batch."""
    keep_host_memory()
    keep_compilations()
    mesh = make_mesh()
    if config.batch_size % mesh.size:
        raise MeshError(
            f"{config.batch_size} sequences do not divide over {mesh.size} devices: change --config.batch_size"
        )
    return mesh


# ---- training and testing ------------------------------------------------------------------------


def run(
    config: TrainConfig, task: Task, lengths: list[int], test_lengths: list[int], mesh: Mesh, out: Path
) -> dict[str, Any]:
    """Train and test; return what results.json holds. Raises NonFiniteLossError, CheckpointError."""
    tester = make_tester(config.model, task, mesh, config.batch_size)
    params, trained = train(config, task, lengths, out, mesh)
    test = lambda n: tester(params, n, TEST_SEQUENCES, [config.seed, _TEST, n])
    longest = max(task.draw(np.random.default_rng(0), 1, n).tokens.shape[1] for n in test_lengths)
    return dict(
        task=task.name,
        label=out.name,
        seed=config.seed,
        fingerprint=find_fingerprint(config, task, lengths),
        **trained,
        batch_size=config.batch_size,
        trained_lengths=lengths,
        chance=task.chance,
        parameters=count_params(params),
        state_numbers=state_size(config.model, longest),
        accuracy=[dict(length=n, **test(n)._asdict()) for n in test_lengths],
        model=dataclasses.asdict(config.model),
    )


def train(
    config: TrainConfig, task: Task, lengths: Sequence[int], out: Path, mesh: Mesh
) -> tuple[Params, dict[str, Any]]:
    """Train for what is left of all steps.

    Returns the parameters, and the numbers of steps, tokens and seconds, and the mean loss over the last step of each
    length.
    """
    optimizer = make_optimizer(config.optimizer, STEPS.value)
    step = make_train_step(config.model, optimizer, mesh, answer_loss)
    abstract, fingerprint = abstract_train_state(config.model, optimizer, mesh), find_fingerprint(config, task, lengths)
    with Checkpoints(checkpoints_of(out) / fingerprint, keep=1) as checkpoints:
        restored = checkpoints.restore_newest(abstract, fingerprint)
        if restored is None:
            state = init_train_state(config.model, optimizer, config.seed, mesh)
            restored = Checkpoint(0, state, {"tokens": 0, "seconds": 0.0, "losses": []})
        number, state, at = restored
        console = Console(f"{out.name} seed {config.seed}", number, STEPS.value, True)
        start, since, n_before = time.monotonic() - at["seconds"], time.monotonic(), at["tokens"]
        try:
            while number < STEPS.value:
                number += 1
                rng = np.random.default_rng([config.seed, _TRAIN, number])
                probe = task.draw(rng, config.batch_size, lengths[number % len(lengths)])
                batch = {name: x[None] for name, x in probe.batch.items()}
                state, metrics = step(state, place_batch(mesh, batch, axis=1))
                losses = [*at["losses"], float(metrics["loss"])][-len(lengths) :]
                n_tokens, seconds = at["tokens"] + probe.tokens.size, time.monotonic() - start
                at = {"tokens": n_tokens, "seconds": seconds, "losses": losses}
                console.update(number)
                if not math.isfinite(losses[-1]):
                    remedy = "lower --config.optimizer.learning_rate"
                    raise NonFiniteLossError(f"the loss is {losses[-1]} at step {number}: {remedy}")
                if number % config.log_every == 0:
                    now, rate = time.monotonic(), (n_tokens - n_before) / max(time.monotonic() - since, 1e-9)
                    measured = {"loss": float(np.mean(losses)), "grad_norm": float(metrics["grad_norm"])}
                    console.report(number, measured | {"tokens_per_second": rate})
                    since, n_before = now, n_tokens
                if number == STEPS.value or number % config.checkpoint_every == 0:
                    checkpoints.save(number, state, at, fingerprint)
        finally:
            console.close()
    loss = float(np.mean(at["losses"]))
    return state.params, dict(steps=STEPS.value, tokens=at["tokens"], seconds=at["seconds"], loss=loss)


def find_fingerprint(config: TrainConfig, task: Task, lengths: Sequence[int]) -> str:
    """A digest of all that a checkpoint depends on."""
    return hashlib.sha256(f"{config.fingerprint} {task} {lengths}".encode()).hexdigest()[:16]


def checkpoints_of(out: Path) -> Path:
    """Where models that are not all trained yet are kept."""
    return out / "unfinished"


# ---- results -------------------------------------------------------------------------------------


def format_results(results: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    lengths = ", ".join(map(str, results["trained_lengths"]))
    lines = [
        f"{results['task']}, seed {results['seed']}: {results['parameters']:,} parameters, a state of "
        f"{results['state_numbers']:,} numbers after the longest test, {results['steps']:,} steps of "
        f"{results['batch_size']} sequences with {lengths} items; last loss {results['loss']:.4f} nats; guessing is "
        f"right {results['chance']:.2%} of the time",
        f"{'items':>8} {'trained':>8} {'right tokens':>13} {'right answers':>14} {'answers':>8}",
    ]
    for point in results["accuracy"]:
        trained = "yes" if point["length"] in results["trained_lengths"] else "no"
        lines.append(
            f"{point['length']:>8} {trained:>8} {point['tokens']:>13.1%} {point['answers']:>14.1%} "
            f"{point['n_answers']:>8,}"
        )
    return lines


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the accuracy of each run by the number of items."""
    figure, axes = make_figure(figsize=(8, 5))
    for i, results in enumerate(runs):
        lengths, tokens, answers = (
            [point[name] for point in results["accuracy"]] for name in ("length", "tokens", "answers")
        )
        label = f"{results['label']}, seed {results['seed']}, state of {results['state_numbers']:,} numbers"
        axes.plot(lengths, answers, f"C{i}o-", ms=4, lw=1.2, label=label)
        if tokens != answers:
            axes.plot(lengths, tokens, f"C{i}--", lw=1, label="the same, single tokens")
    results = runs[0]
    axes.axhline(results["chance"], color="0.5", lw=0.8, ls=":", label="guessing one token")
    axes.axvline(max(results["trained_lengths"]), color="0.7", lw=0.8, label="longest in training")
    axes.set(title=results["task"], xlabel="items in the context", ylabel="right answers", ylim=(-0.02, 1.02))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    save_figure(path, figure)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
