"""Batches and tests: windows of text, of recall and of copying. Axes: B windows, N = T + 1 tokens of each."""

from functools import cache

import numpy as np
from jaxtyping import Int

from experiments.conversion import config
from heinsen.evaluation.probes import Task

VOCAB_SIZE = config.get_config().model.vocab_size
TASKS = {"associative": config.PAIRS, "copy": config.COPIES}
_TRAIN, _TEST, _PLACES = 0, 1, 2  # parts of seeds


def draw_batch(
    text: Int[np.ndarray, "rows N"], seed: int, step: int, window_starts: int
) -> dict[str, Int[np.ndarray, "B ..."]]:
    """The batch of a step: tokens [B, N], these windows of text and others of the tasks, and first_place [B].

    These places are below so many windows, or 0.
    """
    tokens = np.concatenate([text, _draw_tasks(seed, step)])
    n_places = max(1, window_starts * config.LENGTH)
    places = np.random.default_rng([seed, _PLACES, step]).integers(n_places, size=len(tokens))
    return dict(tokens=tokens, first_place=places.astype(np.int32))


@cache
def _draw_tasks(seed: int, step: int) -> Int[np.ndarray, "B N"]:
    """Windows of the tasks: sequences of one number of items, one after the other."""
    rng = np.random.default_rng([seed, _TRAIN, step])
    windows = []
    for name, lengths in TASKS.items():
        task, length = Task(name, VOCAB_SIZE), lengths[step % len(lengths)]
        one = task.draw_whole(rng, 1, length).shape[1]
        n = -(-(config.LENGTH + 1) // one)
        rows = task.draw_whole(rng, n * config.TASK_ROWS, length).reshape(config.TASK_ROWS, -1)
        windows.append(rows[:, : config.LENGTH + 1])
    return np.concatenate(windows)


def draw_tests(n: int) -> dict[str, dict[int, dict[str, np.ndarray]]]:
    """{task: {number of items: a probe's batch of n sequences}}."""
    draw = lambda name, length: Task(name, VOCAB_SIZE).draw(np.random.default_rng([0, _TEST, length]), n, length).batch
    return {name: {length: draw(name, length) for length in lengths} for name, lengths in TASKS.items()}
