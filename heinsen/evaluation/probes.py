"""Probes of recall: sequences of any length, drawn from a seed, whose answers are in the context.

- "associative": n pairs of a key and its value, then every key again in another order, each answered by its value, all
  of them close together.
- "mqar": multi-query associative recall as Arora et al. (2023, "Zoology") measure it: n pairs, then every key again,
  spread over 16 n tokens in all. The others are fillers; the answers are not among the tokens.

n, the number of pairs in the context, is the length of the probe. A state of constant size can hold only so many; a
cache of all tokens, such as softmax attention's, grows with them. All ids are random: there is nothing to learn but to
recall.

Axes: B sequences, T tokens of each, n pairs and as many answers.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float

from heinsen.errors import InputError
from heinsen.models import ModelConfig, Params, hidden_states
from heinsen.models.language_model import logits_of
from heinsen.models.losses import mean_loss_at

_START, _QUERY, _N_MARKS = 0, 1, 2  # ids that begin a sequence and its queries; the others are keys and values
MQAR_SPREAD = 16  # tokens per pair in "mqar"
_POWER = 0.01  # there, of the distances from the context's end to the queries: p(d) ~ d^(_POWER - 1)

# {"tokens" [B, T], "indices" [B, n], "targets" [B, n]}, int32: the targets are due after the tokens at the indices.
Probe = dict[str, np.ndarray]


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
        """Number of ids for keys, and the largest length; the other ids are values."""
        return (self.vocab_size - _N_MARKS) // 2

    @property
    def chance(self) -> float:
        """Share of right answers of a guess among the values."""
        return 1 / (self.vocab_size - _N_MARKS - self.n_keys)

    def check(self, length: int) -> None:
        """Raise ValueError if there are not enough different keys for this length."""
        if not 1 <= length <= self.n_keys:
            raise InputError(
                f"length {length} of task {self.name!r}: it must be from 1 to {self.n_keys}, as model.vocab_size = "
                f"{self.vocab_size} has no more keys"
            )

    def draw(self, rng: np.random.Generator, batch_size: int, length: int) -> Probe:
        """Draw sequences with `length` pairs. Raises ValueError as `check`."""
        self.check(length)
        arrays = TASKS[self.name](self, rng, batch_size, length)
        return {name: x.astype(np.int32) for name, x in arrays.items()}


def _associative(task: Task, rng: np.random.Generator, batch_size: int, length: int) -> Probe:
    keys = _N_MARKS + _different(rng, batch_size, length, task.n_keys)
    values = rng.integers(_N_MARKS + task.n_keys, task.vocab_size, (batch_size, length))
    pairs = np.stack([keys, values], axis=-1)
    order = _different(rng, batch_size, length, length)
    asked = np.take_along_axis(pairs, order[..., None], axis=1)
    start, query = (np.full((batch_size, 1), mark) for mark in (_START, _QUERY))
    tokens = np.concatenate([start, pairs.reshape(batch_size, -1), query, asked.reshape(batch_size, -1)], axis=1)
    indices = np.tile(2 * length + 2 + 2 * np.arange(length), (batch_size, 1))
    return {"tokens": tokens[:, :-1], "indices": indices, "targets": asked[..., 1]}


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
    return {"tokens": tokens, "indices": indices, "targets": values}


TASKS: dict[str, Callable[[Task, np.random.Generator, int, int], Probe]] = {
    "associative": _associative,
    "mqar": _mqar,
}


def _different(rng: np.random.Generator, batch_size: int, count: int, below: int) -> np.ndarray:
    """Draw different integers in [0, below), in any order: int64 [B, count]."""
    return np.stack([rng.choice(below, count, replace=False) for _ in range(batch_size)])


# ---- models --------------------------------------------------------------------------------------


def answer_loss(
    config: ModelConfig, params: Params, batch: dict[str, Array | np.ndarray], mesh: Mesh | None = None
) -> Float[Array, ""]:
    """Return the loss of the answers, in nats per token; only they have logits. `batch` is a `Probe`."""
    return mean_loss_at(config, params, batch["tokens"], batch["indices"], batch["targets"], mesh)


def right_answers(config: ModelConfig, params: Params, batch: dict[str, Array | np.ndarray]) -> Bool[Array, "B n"]:
    """Return whether each target is the likeliest id, given the tokens up to its index."""
    x, _ = hidden_states(config, params, batch["tokens"])
    x = jnp.take_along_axis(x, jnp.asarray(batch["indices"])[..., None], axis=1)
    logits = logits_of(config, params, x.reshape(-1, x.shape[-1]))[:, : config.vocab_size]
    return jnp.argmax(logits, axis=-1).reshape(x.shape[:-1]) == batch["targets"]
