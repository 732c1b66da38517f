"""Train a small model on a probe of recall, and measure what it recalls by the number of things in its context.

    python scripts/recall.py --task=associative --lengths=4,8,16,32 --steps=2000 [--config.model.any=value ...]
    python scripts/recall.py --task=copy --lengths=8,16,32 --test_lengths=8,16,32,64,128 --out=recall/copy
    python scripts/recall.py --task=copy ... --config.model.d_key=32 --out=recall/wide --beside=recall/copy

One model is trained from scratch on all --lengths, in turn; tasks are those of heinsen/probes.py. Of the config count
model, optimizer, batch_size, log_every and seed. Prints a table, and one JSON object on the last line of stdout; --out
receives it as results.json, and accuracy.png.
"""

import dataclasses
import json
import math
import os
import sys
import time
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

from configs import parse_flags
from heinsen.evaluation.probes import TASKS

CONFIG = config_flags.DEFINE_config_file(
    "config",
    str(Path(__file__).resolve().parent.parent / "configs" / "recall.py"),
    "Config file; --config.a.b=value overrides a field.",
)
TASK = flags.DEFINE_enum("task", None, list(TASKS), "What to recall.", required=True)
LENGTHS = flags.DEFINE_list("lengths", ["4", "8", "16", "32"], "Things in the context in training, in turn.")
TEST_LENGTHS = flags.DEFINE_list("test_lengths", None, "Those to measure; none: those of training.")
STEPS = flags.DEFINE_integer("steps", 2000, "Training steps.", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "Folder of the results; none: recall/TASK.")
BESIDE = flags.DEFINE_list("beside", [], "Folders of other results of the task, to draw in the plot too.")

TEST_SEQUENCES = 256  # of each length


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    import jax

    from heinsen.config import ConfigError, from_mapping
    from heinsen.evaluation.probes import Task
    from heinsen.models import count_params, init_model_state
    from heinsen.parallel import MeshError, keep_host_memory, make_mesh
    from heinsen.training.run import TrainConfig

    out = Path(OUT.value or f"recall/{TASK.value}")
    try:
        mapping = CONFIG.value.to_dict()
    except OSError as error:
        sys.exit(f"error: --config cannot be loaded: {str(error).splitlines()[-1].strip()}")
    if (warmup := mapping["optimizer"]["warmup_steps"]) >= STEPS.value:
        sys.exit(
            f"error: --steps={STEPS.value}: the learning rate's warm-up alone takes optimizer.warmup_steps = {warmup}; "
            "give more steps, or a lower --config.optimizer.warmup_steps"
        )
    try:
        # As many tokens as the steps take, for the config's own checks; the length of a sequence is the probe's.
        mapping |= {"total_tokens": STEPS.value * mapping["batch_size"], "sequence_length": 1}
        config = from_mapping(TrainConfig, mapping)
        lengths, test_lengths = (
            whole_numbers("lengths", LENGTHS.value),
            whole_numbers("test_lengths", TEST_LENGTHS.value),
        )
        test_lengths = test_lengths or sorted(set(lengths))
        task = Task(TASK.value, config.model.vocab_size)
        for length in {*lengths, *test_lengths}:
            task.check(length)
        others = [read_results(Path(folder)) for folder in BESIDE.value]
        keep_host_memory()
        mesh = make_mesh()
        if config.batch_size % mesh.size:
            raise MeshError(
                f"{config.batch_size} sequences do not divide over {mesh.size} devices: change --config.batch_size"
            )
        out.mkdir(parents=True, exist_ok=True)
        if not os.access(out, os.W_OK):
            raise PermissionError(None, "permission denied")
    except (ConfigError, MeshError, ValueError) as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: --out={out} cannot be written: {error.strerror}; give another folder")
    try:
        start = time.monotonic()
        params, loss = train(config, task, lengths, mesh, out.name)
        seconds = time.monotonic() - start
        accuracies = {length: test(config, task, length, mesh, params) for length in test_lengths}
    except KeyboardInterrupt:
        sys.exit("interrupted; nothing was written")
    state = jax.eval_shape(lambda: init_model_state(config.model, 1))
    summary = dict(
        task=task.name,
        label=out.name,
        steps=STEPS.value,
        batch_size=config.batch_size,
        trained_lengths=lengths,
        loss=loss,
        chance=task.chance,
        parameters=count_params(params),
        state_numbers=sum(leaf.size for leaf in jax.tree.leaves(state)),
        seconds=seconds,
        accuracy=[dict(length=length, **of._asdict()) for length, of in accuracies.items()],
        model=dataclasses.asdict(config.model),
    )
    print(
        f"{task.name}: {summary['parameters']:,} parameters, a state of {summary['state_numbers']:,} numbers, "
        f"{STEPS.value:,} steps of {config.batch_size} sequences with {', '.join(map(str, lengths))} things; "
        f"last loss {loss:.4f} nats; a guess has {task.chance:.2%} right"
    )
    print(f"{'things':>8} {'trained':>8} {'right tokens':>13} {'right answers':>14} {'answers':>8}")
    for length, of in accuracies.items():
        trained = "yes" if length in lengths else "no"
        print(f"{length:>8} {trained:>8} {of.tokens:>13.1%} {of.answers:>14.1%} {of.n_answers:>8,}")
    text = json.dumps(summary)
    try:
        (out / "results.json").write_text(text + "\n")
        plot([*others, summary], out / "accuracy.png")
        print(f"written: {out / 'results.json'}, {out / 'accuracy.png'}")
    except OSError as error:
        print(f"{out} cannot be written: {error}", file=sys.stderr)
    print(text)


def train(config, task, lengths, mesh, name):
    """(parameters, the loss of the last round over all lengths)."""
    import numpy as np

    from heinsen.evaluation.probes import answer_loss
    from heinsen.parallel import place_batch
    from heinsen.training.console import Console
    from heinsen.training.optimizer import make_optimizer
    from heinsen.training.step import init_train_state, make_train_step

    optimizer = make_optimizer(config.optimizer, STEPS.value)
    state = init_train_state(config.model, optimizer, config.seed, mesh)
    step = make_train_step(config.model, optimizer, mesh, answer_loss)
    console, since, n_tokens, losses = Console(name, 0, STEPS.value, True), time.monotonic(), 0, []
    try:
        for number in range(1, STEPS.value + 1):
            rng = np.random.default_rng([config.seed, 0, number])
            probe = task.draw(rng, config.batch_size, lengths[number % len(lengths)])
            state, metrics = step(
                state, place_batch(mesh, {name: x[None] for name, x in probe._asdict().items()}, axis=1)
            )
            losses = [*losses, float(metrics["loss"])][-len(lengths) :]
            n_tokens += probe.answers.size
            console.update(number)
            if not math.isfinite(losses[-1]):
                sys.exit(f"error: the loss is {losses[-1]} at step {number}: lower --config.optimizer.learning_rate")
            if number % config.log_every == 0:
                now, rate = time.monotonic(), n_tokens / max(time.monotonic() - since, 1e-9)
                measured = {"loss": float(np.mean(losses)), "grad_norm": float(metrics["grad_norm"])}
                console.report(number, measured | {"tokens_per_second": rate})
                since, n_tokens = now, 0
    finally:
        console.close()
    return state.params, float(np.mean(losses))


def test(config, task, length, mesh, params):
    """heinsen.evaluation.probes.Accuracy on sequences that training has not seen."""
    import jax
    import numpy as np

    from heinsen.evaluation.probes import Probe, accuracy, right_answers
    from heinsen.parallel import place_batch, replicated, split_batch

    step = jax.jit(
        lambda params, tokens: right_answers(config.model, params, tokens),
        in_shardings=(None, split_batch(mesh)),
        out_shardings=replicated(mesh),
    )
    rng, probes, right = np.random.default_rng([config.seed, 1, length]), [], []
    for _ in range(-(-TEST_SEQUENCES // config.batch_size)):
        probes.append(task.draw(rng, config.batch_size, length))
        right.append(np.asarray(step(params, place_batch(mesh, {"tokens": probes[-1].tokens})["tokens"])))
    return accuracy(Probe(*map(np.concatenate, zip(*probes, strict=True))), np.concatenate(right))


def whole_numbers(name: str, texts: list[str] | None) -> list[int]:
    """Raises ValueError."""
    if bad := [text for text in texts or () if not text.strip().isdecimal() or int(text) < 1]:
        raise ValueError(f"--{name}: {bad[0]!r} is not a number of things; expected e.g. --{name}=4,8,16")
    return [int(text) for text in texts or ()]


def read_results(folder: Path) -> dict:
    """Raises ValueError."""
    path = folder / "results.json"
    try:
        results = json.loads(path.read_text())
        if results["task"] != TASK.value:
            raise ValueError(f"--beside={folder} holds results of task {results['task']!r}, not {TASK.value!r}")
        results["label"], results["accuracy"][0]["answers"], results["trained_lengths"]  # noqa: B018 (are there)
    except OSError as error:
        raise ValueError(f"--beside={folder}: {path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, LookupError, TypeError) as error:
        raise ValueError(f"--beside={folder}: {path} is damaged or no result of this script ({error!r})") from error
    return results


def plot(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for index, result in enumerate(results):
        lengths = [point["length"] for point in result["accuracy"]]
        label = f"{result['label']}, state of {result['state_numbers']:,} numbers"
        tokens, answers = ([point[name] for point in result["accuracy"]] for name in ("tokens", "answers"))
        axes.plot(lengths, answers, "o-", color=f"C{index}", ms=4, lw=1.2, label=label)
        if tokens != answers:
            axes.plot(lengths, tokens, "--", color=f"C{index}", lw=1, label="the same, single tokens")
    axes.axhline(results[-1]["chance"], color="0.5", lw=0.8, ls=":", label="a guess of one token")
    axes.axvline(max(results[-1]["trained_lengths"]), color="0.7", lw=0.8, label="longest in training")
    axes.set(title=results[-1]["task"], xlabel="things in the context", ylabel="right answers", ylim=(-0.02, 1.02))
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
