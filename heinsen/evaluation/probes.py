"""Probes of recall: sequences of any length, drawn from a seed, whose answers are in the context.

- "associative": n pairs of a key and its value, then every key again in another order, each answered by its value, all
  of them close together.
- "phonebook": n entries of a name and a number of several tokens each, then some of the names, each answered by its
  number (Jelassi et al., 2024, "Repeat After Me").
- "copy": n tokens, answered by the same tokens again (the same paper).
- "mqar": multi-query associative recall as Arora et al. (2023, "Zoology") measure it: n pairs, then every key again,
  spread over 16 n tokens in all. The others are fillers; the answers are not among the tokens.

n, the number of items in the context, is the length of the probe. A state of constant size can hold only so many; a
cache of all tokens, such as softmax attention's, grows with them. All ids are random: there is nothing to learn but to
recall.

Axes: B sequences, T tokens of each, A tokens of its answers, n items.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from heinsen.errors import InputError
from heinsen.files import atomic_writer
from heinsen.models import ModelConfig, Params, hidden_states
from heinsen.models.language_model import logits_of
from heinsen.models.losses import mean_loss_at
from heinsen.parallel import place_batch, replicated, split_batch

_START, _QUERY, _N_MARKS = 0, 1, 2  # ids that begin a sequence and its queries; the others are content
_NAME, _NUMBER = 2, 3  # tokens of a phonebook's names and numbers
_QUERIES = 8  # names that a phonebook is asked for, at most
ASCII = 128  # characters, of probes that are read as text
MQAR_SPREAD = 16  # tokens per pair in "mqar"
_POWER = 0.01  # there, of the distances from the context's end to the queries: p(d) ~ d^(_POWER - 1)


class Probe(NamedTuple):
    """Sequences with their answers: `targets` are to be predicted after the tokens at `indices`.

    `answers` has the number of the answer, from 0 on, that each target belongs to.
    """

    tokens: Int[np.ndarray, "B T"]
    indices: Int[np.ndarray, "B A"]
    targets: Int[np.ndarray, "B A"]
    answers: Int[np.ndarray, " A"]

    @property
    def batch(self) -> dict[str, np.ndarray]:
        """The arrays with an axis B: what `answer_loss` reads."""
        return {"tokens": self.tokens, "indices": self.indices, "targets": self.targets}


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
        return {"phonebook": self.n_keys**_NAME, "copy": np.inf}.get(self.name, self.n_keys)

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

    def draw_whole(self, rng: np.random.Generator, batch_size: int, length: int) -> Int[np.ndarray, "B N"]:
        """Draw sequences with their last token, which models need not read. Raises InputError as `check`, for mqar."""
        if self.name == "mqar":
            raise InputError("task 'mqar': its answers are not among its tokens, so that its sequences are no text")
        probe = self.draw(rng, batch_size, length)
        return np.concatenate([probe.tokens, probe.targets[:, -1:]], axis=1)


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


def _mqar(task: Task, rng: np.random.Generator, batch_size: int, length: int) -> Probe:
    n_tokens, n_context, first_value = MQAR_SPREAD * length, 2 * length, _N_MARKS + task.n_keys
    keys = _N_MARKS + _different(rng, batch_size, length, task.n_keys)
    values = first_value + _different(rng, batch_size, length, task.vocab_size - first_value)
    # Distances without replacement, each key's after those of the keys before it: the largest of log p + Gumbel noise.
    log_p = (_POWER - 1) * np.log(np.arange(1, (n_tokens - n_context) // 2 + 1))
    order = np.argsort(-log_p - rng.gumbel(size=(batch_size, len(log_p))), axis=1)
    indices = n_context + 2 * order[:, :length]
    tokens = np.full((batch_size, n_tokens), _START)
    tokens[:, 0:n_context:2], tokens[:, 1:n_context:2] = keys, values
    np.put_along_axis(tokens, indices, keys, axis=1)
    return Probe(tokens.astype(np.int32), indices.astype(np.int32), values.astype(np.int32), np.arange(length))


TASKS: dict[str, Callable[[Task, np.random.Generator, int, int], Probe]] = {
    "associative": _associative,
    "phonebook": _phonebook,
    "copy": _copy,
    "mqar": _mqar,
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
    is_answer = np.tile(np.arange(n_tokens) >= n_given, n_asked)
    first = tokens.shape[1] - len(is_answer)
    at, answers = first + np.flatnonzero(is_answer), np.repeat(np.arange(n_asked), n_tokens)[is_answer]
    tokens, targets = tokens[:, :-1].astype(np.int32), tokens[:, at].astype(np.int32)
    return Probe(tokens, np.tile((at - 1).astype(np.int32), (n_batch, 1)), targets, answers)


# ---- models --------------------------------------------------------------------------------------


def answer_loss(
    config: ModelConfig, params: Params, batch: dict[str, Array | np.ndarray], mesh: Mesh | None = None
) -> Float[Array, ""]:
    """Return the loss of the answers, in nats per token; only they have logits. `batch` is a `Probe.batch`."""
    return mean_loss_at(config, params, batch["tokens"], batch["indices"], batch["targets"], mesh)


def right_answers(config: ModelConfig, params: Params, batch: dict[str, Array | np.ndarray]) -> Bool[Array, "B A"]:
    """Return whether each target is the likeliest id, given the tokens up to its index."""
    x, _ = hidden_states(config, params, batch["tokens"])
    x = jnp.take_along_axis(x, jnp.asarray(batch["indices"])[..., None], axis=1)
    logits = logits_of(config, params, x.reshape(-1, x.shape[-1]))[:, : config.vocab_size]
    return jnp.argmax(logits, axis=-1).reshape(x.shape[:-1]) == batch["targets"]


class Accuracy(NamedTuple):
    """Accuracy over the answers' tokens, over whole answers, and the number of answers."""

    tokens: float
    answers: float
    n_answers: int


def accuracy(probe: Probe, right: Bool[np.ndarray, "B A"]) -> Accuracy:
    """Return the accuracy of a model whose `right_answers` are these."""
    n_answers = int(probe.answers.max()) + 1
    whole = [np.all(right[:, probe.answers == which], axis=1) for which in range(n_answers)]
    return Accuracy(float(right.mean()), float(np.mean(whole)), n_answers * len(probe.tokens))


Tester = Callable[[Params, int, int, Sequence[int]], Accuracy]  # (parameters, length, n sequences, seed) -> accuracy


def make_tester(model: ModelConfig, task: Task, mesh: Mesh, batch_size: int) -> Tester:
    """Return the function that measures accuracy on at least n sequences of a length, in whole batches."""
    step = jax.jit(
        lambda params, batch: right_answers(model, params, batch),
        in_shardings=(None, split_batch(mesh)),
        out_shardings=replicated(mesh),
    )

    def test(params: Params, length: int, n_sequences: int, seed: Sequence[int]) -> Accuracy:
        rng, probes, right = np.random.default_rng(seed), [], []
        for _ in range(-(-n_sequences // batch_size)):
            probes.append(task.draw(rng, batch_size, length))
            right.append(np.asarray(step(params, place_batch(mesh, probes[-1].batch))))
        tokens, indices, targets, _ = (np.concatenate(x) for x in zip(*probes, strict=True))
        return accuracy(Probe(tokens, indices, targets, probes[0].answers), np.concatenate(right))

    return test


def write_texts(task: Task, lengths: Sequence[int], n_documents: int, seed: int, path: Path) -> None:
    """Write sequences of these lengths in turn to a file, a JSON line each, their ids as ASCII characters.

    Raises InputError for more ids than ASCII, and as `Task.draw_whole`; OSError.
    """
    if task.vocab_size > ASCII:
        raise InputError(f"{task.vocab_size} ids are no ASCII characters: at most {ASCII}")
    rng = np.random.default_rng(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_writer(path) as file:
        for number in range(n_documents):
            whole = task.draw_whole(rng, 1, lengths[number % len(lengths)])[0].tolist()
            file.write(json.dumps({"text": bytes(whole).decode("ascii")}).encode() + b"\n")
