"""The batches of a config: how fast they are read, and what the check of their token ids costs."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from heinsen.config import from_mapping
from heinsen.data.dataset import TokenDataset
from heinsen.data.loader import train_iterator
from heinsen.files import make_folder
from heinsen.training.config import TrainConfig
from heinsen.training.data import TRAIN_SPLIT, open_split
from scripts.benchmarking.measure import device_name, seconds, warm_up, write_results

_ROWS = 4096  # of each timed call


class _UncheckedDataset(TokenDataset):
    def _check_ids(self, tokens: np.ndarray, start: int) -> None:
        pass


def benchmark_data(values: dict[str, Any], repeats: int, out: Path) -> str:
    """Run the benchmark, write OUT/results.json, and return the report. Raises HeinsenError."""
    config = from_mapping(TrainConfig, values)
    checked = open_split(config, TRAIN_SPLIT)
    make_folder(out)
    unchecked = [(_UncheckedDataset(dataset.path), share) for dataset, share in checked]
    n_batches = max(1, _ROWS // config.batch_size)
    calls = {"checked": _reader(config, checked, n_batches), "unchecked": _reader(config, unchecked, n_batches)}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        warm_up(call)
    for repeat in range(repeats):
        for name in sorted(calls, reverse=bool(repeat % 2)):
            times[name].append(seconds(calls[name]))
    n_tokens = n_batches * config.tokens_per_step
    rates = {name: n_tokens / statistics.median(found) for name, found in times.items()}
    cost = statistics.median(a / b for a, b in zip(times["checked"], times["unchecked"], strict=True)) - 1
    results = dict(device=device_name(), tokens_per_second=rates, cost_of_check=cost, seconds=times, config=values)
    path = write_results(out, results)
    return (
        f"{config.batch_size} x {config.sequence_length} tokens from {config.data.path}: "
        f"{rates['checked']:,.0f} tokens/s, {rates['unchecked']:,.0f} without the check of ids, which takes "
        f"{cost:.1%} of the time (median of {repeats} pairs)\nwritten: {path}"
    )


def _reader(config: TrainConfig, data: list[tuple[TokenDataset, float]], n_batches: int) -> Callable[[], None]:
    """Return a call that reads the next batches."""
    batches = train_iterator(data, config.sequence_length, config.batch_size, config.seed)

    def read() -> None:
        for _ in range(n_batches):
            next(batches)

    return read
