"""Documents longer than the windows of training, read in windows, in windows that slide by half, and as a stream.

    python experiments/long_contexts/run.py --corpus=corpus --out=OUT [--size=2M] [--cells=1,2] [--minutes=60]
    python experiments/long_contexts/run.py --report --out=experiments/long_contexts

Cells of experiments/attribution train again, at the rates of its results: four seeds, side by side in one program. They
read the documents of the validation and test splits that have at least 16 windows, as far as 64; an attention with a
cache streams as far as 8. CORPUS and OUT/text.npz are those of attribution. Rerun the same command to resume, at the
cell. OUT receives cells/, and the report: report.md, results.json, contexts.png.

Axes: L lanes, D documents, B documents of a batch, N = T + 1 tokens of a window, P ranges of positions.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from experiments.command import define_flags

define_flags(__name__, "long_contexts", sizes=("2M", "0.5M"))

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from experiments import lanes, tools
from experiments.attribution import config, text
from experiments.attribution import run as attribution
from experiments.long_contexts import report
from experiments.reports import read_results
from heinsen.errors import InputError
from heinsen.models import ModelConfig, init_model_state, next_token_losses, next_token_losses_with_state, state_size

CELLS = (  # the first one of a block is what others are compared with
    "exponential, additions",
    "linear, additions",
    "delta rule, additions",
    "exponential, additions, GPT-2's block",
    "gated softmax, additions, GPT-2's block",
    "softmax, additions, GPT-2's block",
)
SEEDS = attribution.SEEDS[1:]
LEAST_WINDOWS, MOST_WINDOWS = 16, 64  # of a document
MOST_CACHED = 8  # windows, of a stream with a cache
N_ROWS = 16  # documents of a batch
END = 256  # the token after a document


PLAN = attribution.Plan(CELLS)
SMALL_PLAN = attribution.Plan(CELLS[:1] + CELLS[-1:], "0.5M", most_steps=20, most_tests=4)


class Documents(NamedTuple):
    """Documents with the token before their first byte, and how many bytes they have."""

    tokens: Int[np.ndarray, "D N"]
    lengths: Int[np.ndarray, " D"]


def measure(
    plan: attribution.Plan, corpus: Path, out: Path, minutes: float | None, numbers: Sequence[str] | None
) -> dict[str, Any]:
    """Do what is left of the experiment, and return its results. Raises InputError."""
    own = config.get_config(plan.size)
    found = attribution.load_text(corpus, out, plan.size, plan.n_steps)
    documents = find_documents(found, own.sequence_length, plan.most_tests)
    rates = {name: cell["learning_rate"] for name, cell in tuned_cells(plan.size).items()}

    def run(name: str, turn: lanes.Turn) -> dict[str, Any]:
        if name not in rates:
            raise InputError(f"experiments/attribution has no rate at --size={plan.size}: run its cell first")
        return measure_cell(plan, config.CELLS[name], rates[name], found, documents, turn)

    return dict(
        settings=own.to_dict(),
        size=plan.size,
        steps=plan.n_steps,
        tokens=sum_ranges(np.ones((1, *documents.tokens[:, 1:].shape)), documents, own.sequence_length)[0].tolist(),
        **lanes.run_cells({name: name for name in plan.cells}, run, out, minutes, numbers),
    )


def tuned_cells(size: str) -> dict[str, Any]:
    """The cells of the results of attribution."""
    folder = Path(config.__file__).parent
    file = (folder if size == "2M" else folder / size) / "results.json"
    return read_results(file)["cells"] if file.exists() else {}


def find_documents(found: dict[str, np.ndarray], window: int, most: int) -> Documents:
    """Documents of LEAST_WINDOWS to MOST_WINDOWS, where they are cut, the longest first. Raises InputError."""
    documents: list[np.ndarray] = []
    for split in ("validation", "test"):
        targets = found[split][:, 1:].astype(np.int32)
        stream = targets[np.arange(window) < found[f"{split}_lengths"][:, None]]
        documents += np.split(stream, np.flatnonzero(stream == END))
    texts = [document[document != END][: MOST_WINDOWS * window] for document in documents]
    texts = sorted((each for each in texts if len(each) >= LEAST_WINDOWS * window), key=len, reverse=True)[:most]
    if not texts:
        raise InputError(f"no document has {LEAST_WINDOWS * window} bytes: give a corpus with longer ones")
    tokens = np.full((len(texts), MOST_WINDOWS * window + 1), END, np.int32)
    for row, each in zip(tokens, texts, strict=True):
        row[1 : len(each) + 1] = each
    return Documents(tokens, np.array([len(each) for each in texts]))


def measure_cell(
    plan: attribution.Plan,
    cell: config.Cell,
    rate: float,
    found: dict[str, np.ndarray],
    documents: Documents,
    turn: lanes.Turn,
) -> dict[str, Any]:
    """Train a cell, and let it read the documents in each way."""
    own = attribution.train_config(cell, plan.size)
    model, window = own.model, own.sequence_length
    batch_of = text.training_batches(found, SEEDS)
    programs = lanes.Lanes.compile(own, len(SEEDS), [batch_of(0)])
    with turn:
        began = time.monotonic()
        params, _ = programs.train(SEEDS, [rate] * len(SEEDS), batch_of, plan.n_steps)
        nats = {
            name: sum_ranges(losses, documents, window)
            for name, losses in read_documents(model, params, documents, window).items()
        }
        seconds = time.monotonic() - began
    n_cached = report.n_ranges(MOST_CACHED)
    if model.has_cache:
        nats["stream"] = nats["stream"][..., :n_cached]
    n_bytes = np.minimum(documents.lengths, MOST_CACHED * window).sum() * len(SEEDS)
    shown = ", ".join(f"{name} {sums[..., :n_cached].sum() / n_bytes:.3f}" for name, sums in nats.items())
    return dict(
        summary=f"{shown} nats per byte of the first {MOST_CACHED} windows; {seconds:.0f} s",
        model=cell.fields(plan.size),
        learning_rate=rate,
        seeds=SEEDS,
        seconds=seconds,
        state_numbers={
            "windows": state_size(model, window),
            "sliding": state_size(model, window),
            "stream": state_size(model, MOST_CACHED * window),
        },
        nats={name: np.round(sums, 2).tolist() for name, sums in nats.items()},
    )


def read_documents(
    model: ModelConfig, params: Any, documents: Documents, window: int
) -> dict[str, Float[np.ndarray, "L D T"]]:
    """Losses of all bytes by the way of reading; 0 where there is no byte, or a stream ends."""
    n_lanes = jax.tree.leaves(params)[0].shape[0]
    read = jax.jit(lanes.over_lanes(partial(next_token_losses, model)))
    read_on = jax.jit(lanes.over_lanes(partial(next_token_losses_with_state, model)))
    to_lanes = lambda x: jnp.broadcast_to(x, (n_lanes, *x.shape))
    most_streamed = MOST_CACHED if model.has_cache else MOST_WINDOWS
    losses = {name: np.zeros((n_lanes, *documents.tokens[:, 1:].shape)) for name in ("windows", "sliding", "stream")}
    for rows, n_windows in batches(documents, window):
        tokens = documents.tokens[rows]
        at = lambda start: to_lanes(tokens[:, start : start + window + 1])  # noqa: B023
        state = jax.tree.map(to_lanes, init_model_state(model, len(tokens), MOST_CACHED * window))
        for start in range(0, n_windows * window, window):
            here = slice(start, start + window)
            losses["windows"][:, rows, here] = read(params, at(start))
            losses["sliding"][:, rows, here] = losses["windows"][:, rows, here]
            if start < most_streamed * window:
                losses["stream"][:, rows, here], state = read_on(params, at(start), state)
        half = window // 2
        for start in range(half, n_windows * window - half, window):  # between the windows that are read above
            losses["sliding"][:, rows, start + half : start + window] = read(params, at(start))[:, :, half:]
    return losses


def batches(documents: Documents, window: int) -> Iterator[tuple[slice, int]]:
    """Documents of about one length, and how many windows the longest of them has."""
    for first in range(0, len(documents.lengths), N_ROWS):
        rows = slice(first, first + N_ROWS)
        yield rows, -(-int(documents.lengths[rows].max()) // window)


def sum_ranges(losses: Float[np.ndarray, "L D T"], documents: Documents, window: int) -> Float[np.ndarray, "L D P"]:
    """Sums over ranges of positions: the first window, then up to 2, 4, 8, ... windows."""
    positions = np.arange(losses.shape[-1])
    ranges = np.ceil(np.log2(positions // window + 1)).astype(int)
    is_byte = positions < documents.lengths[:, None]
    n_ranges = report.n_ranges(MOST_WINDOWS)
    return np.stack([(losses * is_byte)[..., ranges == i].sum(-1) for i in range(n_ranges)], axis=-1)


if __name__ == "__main__":
    tools.run_experiment(measure, PLAN, SMALL_PLAN, report)
