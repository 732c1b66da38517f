"""Accumulation passes: how a step's batch is divided into them, by the model's objective.

A passes of R rows that this process reads, M = A R rows, N tokens of a window.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from heinsen.models.masking import mask_tokens
from heinsen.parallel import process_rows
from heinsen.training.config import TrainConfig


def rows_by_pass(config: TrainConfig, mesh: Mesh) -> Int[np.ndarray, " M"]:
    """Return the rows of the global batch that this process reads, in ascending order: those of each pass in turn."""
    firsts = np.arange(0, config.batch_size, config.sequences_per_pass)
    return (firsts[:, None] + process_rows(mesh, config.sequences_per_pass)).reshape(-1)


def make_passes(config: TrainConfig, windows: Int[np.ndarray, "M N"], step: int, rows: Int[np.ndarray, " M"]) -> Any:
    """Return the batches [A, R, ...] that the loss of the model's objective reads in a step.

    They are the windows, or for a masked model the arrays of `mask_tokens`.

    Args:
      windows: tokens of these rows.
      step: a masked model's masks depend on it.
      rows: as returned by `rows_by_pass`.
    """
    model = config.model
    batch = windows if model.causal else mask_tokens(model, windows[:, 1:], config.seed, step, rows)
    return jax.tree.map(lambda x: x.reshape(config.accumulation_steps, -1, *x.shape[1:]), batch)


def scale_weights(batches: dict[str, Array]) -> dict[str, Array]:
    """Scale a masked model's "weights": the mean over the passes becomes the mean over all hidden tokens.

    Passes hide different numbers of tokens.
    """
    weights = batches["weights"]
    return batches | {"weights": weights * (len(weights) / jnp.maximum(jnp.sum(weights), 1))}
