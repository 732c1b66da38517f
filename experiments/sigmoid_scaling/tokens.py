"""Tokens to draw sequences from: random vectors, or hidden states of a trained model on text.

Queries, keys and values are random maps of them. Axes: H heads, N tokens, d features.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from heinsen.errors import InputError
from heinsen.models import hidden_states
from heinsen.parallel import make_mesh
from heinsen.training.data import open_split
from heinsen.training.folder import load_run
from heinsen.weights import load_params

HEADS, FEATURES = 2, 32
WIDTH, VOCABULARY = 256, 4096  # of the random tokens


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Tokens as the heads see them: q, k, v [H, N, d]. If `in_order`, sequences are runs of consecutive tokens."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    in_order: bool

    def draw(self, rng: np.random.Generator, n_sequences: int, n: int) -> np.ndarray:
        """Return the indices of the tokens of random sequences, [n_sequences, n]."""
        n_tokens = self.k.shape[1]
        if not self.in_order:
            return rng.integers(n_tokens, size=(n_sequences, n))
        return rng.integers(n_tokens - n + 1, size=(n_sequences, 1)) + np.arange(n)


def draw_maps(rng: np.random.Generator, width: int) -> np.ndarray:
    """Return W_q, W_k and W_v of all heads, [3, H, width, d], with normal elements of variance 1 / width."""
    return rng.standard_normal((3, HEADS, width, FEATURES)) / np.sqrt(width)


def random_tokens(rng: np.random.Generator, mean: float) -> Tokens:
    """Return normal vectors around a common mean, `mean` times as long as their spread, with elements of order 1."""
    x = rng.standard_normal((VOCABULARY, WIDTH)) + mean * rng.standard_normal(WIDTH)
    x /= np.sqrt(1 + mean**2)
    return Tokens("random tokens", *np.einsum("nw,phwd->phnd", x, draw_maps(rng, WIDTH), optimize=True), False)


def text_tokens(rng: np.random.Generator, workdir: Path, at_most: int, at_least: int) -> list[Tokens]:
    """Return the last hidden states (LayerNorm outputs) of a run's model on text: in order, and drawn independently.

    The text is the run's validation split, the first tokens of each dataset in windows of the training length. Raises
    HeinsenError, for fewer than `at_least` tokens InputError.
    """
    config = load_run(workdir)
    length = config.sequence_length
    parts = [np.zeros((0, length), np.int32)]
    for dataset, share in open_split(config, config.data.validation_split):
        n = min(int(at_most * share), dataset.n_tokens) // length
        parts.append(dataset.read(0, n * length).reshape(n, length).astype(np.int32))
    windows = np.concatenate(parts)
    if windows.size < at_least:
        raise InputError(
            f"{config.data.path}, validation: windows of {length} hold {windows.size:,} of at most {at_most:,} tokens, "
            f"a sequence {at_least:,}: give smaller --lengths, more --tokens or a larger split"
        )
    _, params = load_params(workdir, config.model, make_mesh())
    maps = draw_maps(rng, config.model.d_model).astype(np.float32)

    @jax.jit
    def map_hidden_states(params, tokens, maps):
        x, _ = hidden_states(config.model, params, tokens)
        return jnp.einsum("btw,phwd->phbtd", x, maps)

    size = max(1, 2**15 // length)  # windows at a time
    batches = [windows[begin : begin + size] for begin in range(0, len(windows), size)]
    mapped = [np.asarray(map_hidden_states(params, batch, maps)) for batch in tqdm(batches, "hidden states of text")]
    q, k, v = np.concatenate(mapped, axis=2).reshape(3, HEADS, -1, FEATURES)
    return [Tokens("text, in order", q, k, v, True), Tokens("text, independent", q, k, v, False)]
