"""Probes of recall: sequences whose answers stand in the context, made from a seed, at any length.

- "associative": n pairs of a key and its value, then every key again, in another order: its value is the answer
  (multi-query associative recall of Arora et al., 2023, "Zoology").
- "phonebook": n entries of a name and a number of several tokens each, then some of the names: their numbers are the
  answers (Jelassi et al., 2024, "Repeat After Me").
- "copy": n tokens, then the same again: the answer (the same paper).

The number of things that the context holds, n, is the probe's length. A state of fixed size holds so many and no more;
a cache of all tokens, as softmax attention's, grows with them. All ids are drawn at random, so that there is nothing to
learn but to recall.

Axes: B sequences, T predicted tokens of each.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from heinsen.models import ModelConfig, Params, forward, mean_loss

_START, _QUERY, _N_MARKS = 0, 1, 2  # ids that begin a sequence and its queries; the others are content
_NAME, _NUMBER = 2, 3  # tokens of a phonebook's names and numbers
_QUERIES = 8  # names that a phonebook is asked for, at most


class Probe(NamedTuple):
    """tokens: int32 [B, T + 1]. answers: int32 [B, T], which answer the target tokens[:, t + 1] is of; 0: none."""

    tokens: np.ndarray
    answers: np.ndarray


@dataclasses.dataclass(frozen=True)
class Task:
    """A probe's kind, and the ids that it may use: those of a vocabulary of `vocab_size`."""

    name: str
    vocab_size: int

    def __post_init__(self):
        if self.name not in TASKS:
            raise ValueError(f"task {self.name!r}: choose {', '.join(TASKS)}")
        if self.vocab_size < _N_MARKS + 2:
            raise ValueError(f"model.vocab_size = {self.vocab_size}: the probes need {_N_MARKS + 2} ids at least")

    @property
    def n_keys(self) -> int:
        """Ids of keys, or of the tokens of names; the rest are values."""
        return (self.vocab_size - _N_MARKS) // 2

    @property
    def chance(self) -> float:
        """How often a guess among the ids that may answer has a token right."""
        return 1 / (self.vocab_size - _N_MARKS - (0 if self.name == "copy" else self.n_keys))

    @property
    def max_length(self) -> float:
        """The greatest length for which there are enough different keys."""
        return {"associative": self.n_keys, "phonebook": self.n_keys**_NAME, "copy": np.inf}[self.name]

    def check(self, length: int) -> None:
        """Raises ValueError where there are not so many different keys."""
        if not 1 <= length <= self.max_length:
            raise ValueError(
                f"length {length} of task {self.name!r}: it must be from 1 to {self.max_length}, as model.vocab_size = "
                f"{self.vocab_size} has no more keys"
            )

    def draw(self, rng: np.random.Generator, batch_size: int, length: int) -> Probe:
        """Sequences that hold `length` things. Raises ValueError as `check`."""
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
    things = rng.integers(_N_MARKS, task.vocab_size, (batch_size, length, 1))
    return _sequence(things, things.reshape(batch_size, 1, length), n_given=0)


TASKS = {"associative": _associative, "phonebook": _phonebook, "copy": _copy}


def _different(rng: np.random.Generator, batch_size: int, count: int, below: int) -> np.ndarray:
    """Different integers from 0 on, int64 [B, count], in any order."""
    return np.stack([rng.choice(below, count, replace=False) for _ in range(batch_size)])


def _sequence(context: np.ndarray, asked: np.ndarray, n_given: int) -> Probe:
    """The start, the context [B, n, ...], the mark of queries, and queries [B, m, ...] whose tokens after the first
    n_given are the answers."""
    n_batch, n_asked, n_tokens = asked.shape
    mark = lambda token: np.full((n_batch, 1), token)
    flat = lambda x: x.reshape(n_batch, -1)
    tokens = np.concatenate([mark(_START), flat(context), mark(_QUERY), flat(asked)], axis=1)
    which = np.repeat(np.arange(1, n_asked + 1), n_tokens) * (np.arange(n_asked * n_tokens) % n_tokens >= n_given)
    answers = np.zeros((n_batch, tokens.shape[1] - 1), np.int32)
    answers[:, -len(which) :] = which
    return Probe(tokens.astype(np.int32), answers)


# ---- models --------------------------------------------------------------------------------------


def answer_loss(
    config: ModelConfig, params: Params, batch: dict[str, Array], mesh: Mesh | None = None
) -> Float[Array, ""]:
    """Nats a token of a probe's answers alone (the batch: `Probe._asdict`), for `make_train_step`."""
    return mean_loss(config, params, batch["tokens"], mesh, (batch["answers"] > 0).astype(jnp.float32))


def right_answers(config: ModelConfig, params: Params, tokens: Int[Array, "B T+1"]) -> Bool[Array, "B T"]:
    """Whether each target is the likeliest id, given all before it (of an answer, the right beginning too)."""
    logits = forward(config, params, tokens[:, :-1])[0][..., : config.vocab_size]
    return jnp.argmax(logits, axis=-1) == tokens[:, 1:]


class Accuracy(NamedTuple):
    """Shares of the answers' tokens, and of whole answers, that are right; of how many answers."""

    tokens: float
    answers: float
    n_answers: int


def accuracy(probe: Probe, right: np.ndarray) -> Accuracy:
    """Of `right_answers`, bool [B, T]."""
    n_answers = int(probe.answers.max())
    whole = [np.all(right | (probe.answers != which), axis=1) for which in range(1, n_answers + 1)]
    return Accuracy(float(right[probe.answers > 0].mean()), float(np.mean(whole)), n_answers * len(probe.tokens))
