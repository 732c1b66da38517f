"""Probes of recall: sequences of any length, drawn from a seed, whose answers are in the context.

- "associative": n pairs of a key and its value, then every key again in another order, each answered by its value
  (multi-query associative recall of Arora et al., 2023, "Zoology").
- "phonebook": n entries of a name and a number of several tokens each, then some of the names, each answered by its
  number (Jelassi et al., 2024, "Repeat After Me").
- "copy": n tokens, answered by the same tokens again (the same paper).

n, the number of items in the context, is the length of the probe. A state of constant size can hold only so many; a
cache of all tokens, such as softmax attention's, grows with them. All ids are random: there is nothing to learn but to
recall.

Axes: B sequences, T predicted tokens of each, N = T + 1 tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from heinsen.errors import InputError
from heinsen.models import ModelConfig, Params, forward, mean_loss

_START, _QUERY, _N_MARKS = 0, 1, 2  # ids that begin a sequence and its queries; the others are content
_NAME, _NUMBER = 2, 3  # tokens of a phonebook's names and numbers
_QUERIES = 8  # names that a phonebook is asked for, at most


class Probe(NamedTuple):
    """Sequences, and the number of the answer, from 1 on, that each target tokens[:, t + 1] belongs to (0: none)."""

    tokens: Int[np.ndarray, "B N"]
    answers: Int[np.ndarray, "B N-1"]


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of probe, a key of TASKS, for a vocabulary of `vocab_size` ids. Raises ValueError."""

    name: str
    vocab_size: int

    def __post_init__(self) -> None:
        if self.name not in TASKS:
            raise InputError(f"task {self.name!r}: choose {', '.join(TASKS)}")
        if self.vocab_size < _N_MARKS + 2:
            raise InputError(f"model.vocab_size = {self.vocab_size}: the probes need {_N_MARKS + 2} ids at least")

    @property
    def n_keys(self) -> int:
        """Number of ids for keys, or for the tokens of names; the others are values."""
        return (self.vocab_size - _N_MARKS) // 2

    @property
    def chance(self) -> float:
        """Accuracy per token of a guess among the possible answers."""
        return 1 / (self.vocab_size - _N_MARKS - (0 if self.name == "copy" else self.n_keys))

    @property
    def max_length(self) -> int | float:
        """Largest length for which there are enough different keys."""
        return {"associative": self.n_keys, "phonebook": self.n_keys**_NAME, "copy": np.inf}[self.name]

    def check(self, length: int) -> None:
        """Raise ValueError if there are not enough different keys for this length."""
        if not 1 <= length <= self.max_length:
            raise InputError(
                f"length {length} of task {self.name!r}: it must be from 1 to {self.max_length}, as model.vocab_size = "
                f"{self.vocab_size} has no more keys"
            )

    def draw(self, rng: np.random.Generator, batch_size: int, length: int) -> Probe:
        """Draw sequences with `length` items. Raises ValueError as `check`."""
        self.check(length)
        return TASKS[self.name](self, rng, batch_size, length)


def _associative(task: Task, rng: np.random.Generator, batch_size: int, length: int) -> Probe:
    keys = _N_MARKS + _different(rng, batch_size, length, task.n_keys)
    values = rng.integers(_N_MARKS + task.n_keys, task.vocab_size, (batch_size, length))
    order = _different(rng, batch_size, length, length)
    asked = [np.take_along_axis(x, order, axis=1)[..., None] for x in (keys, values)]
    return _sequence(np.stack([keys, values], axis=-1), np.concatenate(asked, axis=-1), n_given=1)


def _phonebook(task: Task, rng: np.random.Generator, batch_size: int, length: int) -> Probe:
    numbers = _different(rng, batch_size, length, task.n_keys**_NAME)
    names = _N_MARKS + np.stack([numbers // task.n_keys, numbers % task.n_keys], axis=-1)
    values = rng.integers(_N_MARKS + task.n_keys, task.vocab_size, (batch_size, length, _NUMBER))
    entries = np.concatenate([names, values], axis=-1)
    order = _different(rng, batch_size, min(length, _QUERIES), length)
    return _sequence(entries, np.take_along_axis(entries, order[..., None], axis=1), n_given=_NAME)


def _copy(task: Task, rng: np.random.Generator, batch_size: int, length: int) -> Probe:
    items = rng.integers(_N_MARKS, task.vocab_size, (batch_size, length, 1))
    return _sequence(items, items.reshape(batch_size, 1, length), n_given=0)


TASKS: dict[str, Callable[[Task, np.random.Generator, int, int], Probe]] = {
    "associative": _associative,
    "phonebook": _phonebook,
    "copy": _copy,
}


def _different(rng: np.random.Generator, batch_size: int, count: int, below: int) -> np.ndarray:
    """Draw different integers in [0, below), in any order: int64 [B, count]."""
    return np.stack([rng.choice(below, count, replace=False) for _ in range(batch_size)])


def _sequence(context: np.ndarray, asked: np.ndarray, n_given: int) -> Probe:
    """Join the start, the context [B, n, ...], the mark of queries and the queries [B, m, ...].

    The tokens of each query after the first n_given are its answer.
    """
    n_batch, n_asked, n_tokens = asked.shape

    def mark(token: int) -> np.ndarray:
        return np.full((n_batch, 1), token)

    def flat(x: np.ndarray) -> np.ndarray:
        return x.reshape(n_batch, -1)

    tokens = np.concatenate([mark(_START), flat(context), mark(_QUERY), flat(asked)], axis=1)
    which = np.repeat(np.arange(1, n_asked + 1), n_tokens) * (np.arange(n_asked * n_tokens) % n_tokens >= n_given)
    answers = np.zeros((n_batch, tokens.shape[1] - 1), np.int32)
    answers[:, -len(which) :] = which
    return Probe(tokens.astype(np.int32), answers)


# ---- models --------------------------------------------------------------------------------------


def answer_loss(
    config: ModelConfig, params: Params, batch: dict[str, Array], mesh: Mesh | None = None
) -> Float[Array, ""]:
    """Return the loss, in nats per token, of the answers alone; `batch` is a `Probe._asdict()`."""
    return mean_loss(config, params, batch["tokens"], mesh, (batch["answers"] > 0).astype(jnp.float32))


def right_answers(config: ModelConfig, params: Params, tokens: Int[Array | np.ndarray, "B N"]) -> Bool[Array, "B N-1"]:
    """Return whether each target is the likeliest id, given all tokens before it, those of its answer included."""
    logits = forward(config, params, tokens[:, :-1])[0][..., : config.vocab_size]
    return jnp.argmax(logits, axis=-1) == tokens[:, 1:]


class Accuracy(NamedTuple):
    """Accuracy over the answers' tokens, over whole answers, and the number of answers."""

    tokens: float
    answers: float
    n_answers: int


def accuracy(probe: Probe, right: Bool[np.ndarray, "B T"]) -> Accuracy:
    """Return the accuracy of a model whose `right_answers` are these."""
    n_answers = int(probe.answers.max())
    whole = [np.all(right | (probe.answers != which), axis=1) for which in range(1, n_answers + 1)]
    return Accuracy(float(right[probe.answers > 0].mean()), float(np.mean(whole)), n_answers * len(probe.tokens))
