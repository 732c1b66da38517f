"""Training losses of configs/demo.py over its first steps, beside those of a CPU for the same data and seed.

The text is generated, so that every machine has the same bytes. The CPU's losses are in cpu_losses.json, by two
implementations of attention: how far these two are apart is what rounding alone does. On an accelerator the run is
repeated with float32 matrix products, as the CPU's are; by default accelerators round their inputs to fewer bits.
"""

import bisect
import hashlib
import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from configs import demo
from heinsen.config import from_mapping
from heinsen.data.preparation import Settings, prepare
from heinsen.errors import HeinsenError
from heinsen.files import make_folder, write_atomically
from heinsen.training.config import TrainConfig
from heinsen.training.loop import train
from scripts.benchmarking.measure import describe_machine, machine, write_results

REFERENCE = Path(__file__).with_name("cpu_losses.json")
STEPS = 200
_BYTES = {"train": 400_000, "validation": 20_000}
_FORMS = "chunked", "scan"  # the reference's implementations; the first is compared with


class LossesError(HeinsenError, RuntimeError):
    """The CPU's losses cannot be compared with, or cannot be made here."""


def compare_losses(out: Path) -> str:
    """Train on this device, write OUT/results.json, and return the report. Raises HeinsenError."""
    reference = read_reference()
    data = make_data(out)
    precisions = ("float32",) if jax.default_backend() == "cpu" else ("default", "float32")
    found = {precision: run(out / precision, data, "chunked", precision) for precision in precisions}
    summary = machine() | dict(
        steps=STEPS,
        losses=found,
        cpu=reference["losses"],
        cpu_device=reference["device"],
        differences={
            name: largest_difference(losses, reference["losses"][_FORMS[0]]) for name, losses in found.items()
        },
        cpu_difference=largest_difference(*(reference["losses"][form] for form in _FORMS)),
    )
    write_results(out, summary)
    return "\n".join(report(summary))


def write_reference(out: Path) -> str:
    """Train on a CPU by two implementations, in OUT, and write cpu_losses.json; return a line. Raises HeinsenError."""
    if jax.default_backend() != "cpu":
        raise LossesError(f"--write_reference needs a CPU, here is {machine()['device']}: set JAX_PLATFORMS=cpu")
    data = make_data(out)
    losses = {form: run(out / form, data, form, "float32") for form in _FORMS}
    record = benchmark_settings() | machine() | dict(losses=losses)
    write_atomically(REFERENCE, json.dumps(record) + "\n")
    return f"written: {REFERENCE}"


def read_reference() -> dict[str, Any]:
    """Return the contents of cpu_losses.json. Raises LossesError if it is of another config or text."""
    reference = json.loads(REFERENCE.read_text())
    for name, value in benchmark_settings().items():
        if reference[name] != value:
            raise LossesError(
                f"{REFERENCE} was made with another {name}: make it anew by `python scripts/benchmark.py losses "
                "--write_reference` on a CPU"
            )
    return reference


def benchmark_settings() -> dict[str, Any]:
    """Return what the losses depend on, besides the program: the config and the text."""
    text = "".join(make_text(split) for split in _BYTES)
    return {"config": config_values(Path("data")), "text": hashlib.sha256(text.encode()).hexdigest()}


def config_values(data: Path) -> dict[str, Any]:
    """Return configs/demo.py shortened to STEPS steps, every one logged."""
    config = demo.get_config()
    config.update(total_tokens=STEPS * config.batch_size * config.sequence_length, log_every=1)
    config.update(validate_every=STEPS, checkpoint_every=STEPS, validation_tokens=10_000)
    config.data.path = str(data)
    config.model.update(vocab_size=257, padded_vocab_size=264)
    return config.to_dict()


def make_data(out: Path) -> Path:
    """Write the text's splits as token datasets, unless they are there; return their folder."""
    texts, data = out / "text", out / "data"
    make_folder(texts)
    for split in _BYTES:
        path = texts / f"{split}.txt"
        write_atomically(path, make_text(split))
        prepare(Settings((str(path.absolute()),), split, "bytes"), data, workers=1)
    return data


def make_text(split: str) -> str:
    """Return lines of words with frequencies 1, 1/2, 1/3, ...; each split has its own lines, all the same words.

    `random()` of the standard library gives the same numbers in every version of Python.
    """
    draw = random.Random(0).random
    letters = "etaoinshrdlucmfwypvbgk"
    words = ["".join(letters[int(draw() ** 2 * len(letters))] for _ in range(2 + int(6 * draw()))) for _ in range(500)]
    shares = list(itertools.accumulate(1 / rank for rank in range(1, 1 + len(words))))
    draw = random.Random(split).random
    lines, size = [], 0
    while size < _BYTES[split]:
        chosen = [words[bisect.bisect(shares, shares[-1] * draw())] for _ in range(4 + int(12 * draw()))]
        lines.append(" ".join(chosen) + ".\n")
        size += len(lines[-1])
    return "".join(lines)


def run(workdir: Path, data: Path, implementation: str, precision: str) -> list[float]:
    """Train in a run folder, resuming it if it has begun; return the loss of every step."""
    values = config_values(data)
    values["model"]["implementation"] = implementation
    print(f"training: {implementation}, {precision} matrix products", file=sys.stderr, flush=True)
    with jax.default_matmul_precision(precision):
        train(from_mapping(TrainConfig, values), workdir)
    entries = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = {entry["step"]: entry["loss"] for entry in entries if "loss" in entry}
    return [losses[step] for step in range(1, STEPS + 1)]


def largest_difference(losses: Sequence[float], others: Sequence[float]) -> dict[str, float]:
    """Return the largest difference over all steps and over the first 20, before rounding has been magnified."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return {"the first 20 steps": max(differences[:20]), "all steps": max(differences)}


def report(summary: dict[str, Any]) -> list[str]:
    """Return the lines of the report."""
    lines = [
        describe_machine(summary),
        f"{summary['steps']} training steps of configs/demo.py, beside {summary['cpu_device']}",
    ]
    cpu = summary["cpu"]["chunked"]
    for precision, losses in summary["losses"].items():
        ends = f"loss {losses[0]:.4f} to {losses[-1]:.4f} (CPU: {cpu[0]:.4f} to {cpu[-1]:.4f})"
        lines.append(f"{precision} matrix products: {ends}; {describe(summary['differences'][precision])}")
    return [*lines, f"the CPU's chunked and scan forms: {describe(summary['cpu_difference'])}"]


def describe(found: dict[str, float]) -> str:
    return "largest difference " + ", ".join(f"{x:.2g} over {where}" for where, x in found.items())
