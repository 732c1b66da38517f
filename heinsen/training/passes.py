"""Accumulation passes: how a step's batch is divided into them, by the model's objective.

A passes of R rows that this process reads, N = A R, T tokens of a window.
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


def rows_by_pass(config: TrainConfig, mesh: Mesh) -> Int[np.ndarray, "A R"]:
    """Return the rows of the global batch that this process reads in each pass.

    A pass reads neighbors, except of a batch whose rows carry a state: there row r belongs to pass r mod A, so that
    the state of a row stays on its device (`split_carry`).
    """
    rows, n_passes = process_rows(mesh, config.sequences_per_pass), config.accumulation_steps
    number = np.arange(n_passes)[:, None]
    return rows * n_passes + number if config.carry_state else number * config.sequences_per_pass + rows


def make_passes(config: TrainConfig, windows: Int[np.ndarray, "N T"], step: int, rows: Int[np.ndarray, "A R"]) -> Any:
    """Return the batches [A, R, ...] that the loss of the model's objective reads in a step.

    They are the windows, or for a masked model the arrays of `mask_tokens`.

    Args:
      windows: of the rows in ascending order.
      step: a masked model's masks depend on it.
      rows: of `rows_by_pass`.
    """
    model = config.model
    in_order = np.sort(rows, axis=None)
    batch = windows if model.causal else mask_tokens(model, windows[:, 1:], config.seed, step, in_order)
    return jax.tree.map(lambda x: x[np.searchsorted(in_order, rows)], batch)


def scale_weights(batches: Any) -> Any:
    """Scale a masked model's "weights": the mean over the passes becomes the mean over all hidden tokens.

    Passes hide different numbers of tokens. Batches without weights are returned as they are.
    """
    if not isinstance(batches, dict) or "weights" not in batches:
        return batches
    weights = batches["weights"]
    return batches | {"weights": weights * (len(weights) / jnp.maximum(jnp.sum(weights), 1))}


def split_carry(n_passes: int, x: Array) -> Array:
    """Return what the rows carry [B A, ...] by passes [A, B, ...], as in `rows_by_pass`."""
    return x.reshape(-1, n_passes, *x.shape[1:]).swapaxes(0, 1)


def join_carry(x: Array) -> Array:
    """Invert `split_carry`."""
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])
