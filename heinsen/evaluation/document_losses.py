"""Losses of a split document by document, every token predicted once, in one of two ways:

- in windows of the training length (`measure_windows`), as in training: the model sees nothing outside the window;
- streaming (`measure_streaming`): every document from its start to its end, with the model's state carried along.

Axes: B rows, T or W tokens of a row, D documents, P ranges of positions.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from heinsen.data.documents import DocumentBatches, Documents
from heinsen.data.loader import Batch, EvaluationBatches
from heinsen.models import (
    ModelConfig,
    ModelState,
    Params,
    check_room,
    forget,
    init_model_state,
    next_token_losses_with_state,
)
from heinsen.models.masking import window_losses
from heinsen.parallel import n_batch_parts, place_batch, replicated, split_batch
from heinsen.progress import track

# Positions in ranges 1, 2, 3-4, 5-8, ..., 32769-65536, and all after that.
LAST_POSITIONS: np.ndarray = 2 ** np.arange(17)
N_RANGES = len(LAST_POSITIONS) + 1


class DocumentLosses:
    """Sums of losses over the tokens of a split, in float64.

    A token's position is the number of tokens of its document before it, including the end-of-text token that begins
    the document: 1 for a document's first. Its context is the number of tokens before it in its window of `window`
    tokens. A model that `forgets` at a document's start sees none from before the document.

    Attributes:
      nats: sums by document and range of positions, [D, P].
      context_nats, context_tokens: sums by range of the context, [P].
      far_nats, far_tokens: sums by document, [D], over the tokens more than `window` from their document's start with a
        context of at least half the window: a long context, but not all of the document.
    """

    def __init__(self, documents: Documents, window: int, forgets: bool) -> None:
        self.documents, self.window, self.forgets = documents, window, forgets
        self.nats = np.zeros((len(documents), N_RANGES))
        self.context_nats, self.context_tokens = np.zeros(N_RANGES), np.zeros(N_RANGES, np.int64)
        self.far_nats, self.far_tokens = np.zeros(len(documents)), np.zeros(len(documents), np.int64)

    def add(self, index: Int[np.ndarray, " N"], losses: Float[np.ndarray, " N"]) -> None:
        """Add the losses of the tokens with these indices in the stream."""
        losses = losses.astype(np.float64)
        document = np.searchsorted(self.documents.starts, index, side="right") - 1
        position = index - self.documents.starts[document] + 1
        context = index % self.window + 1
        if self.forgets:
            context = np.minimum(context, position)
        # Only the cells that these tokens belong to: there may be millions of documents.
        cells, cell_of = np.unique(document * N_RANGES + np.searchsorted(LAST_POSITIONS, position), return_inverse=True)
        self.nats.reshape(-1)[cells] += np.bincount(cell_of, losses)
        context_range = np.searchsorted(LAST_POSITIONS, context)
        self.context_nats += np.bincount(context_range, losses, N_RANGES)
        self.context_tokens += np.bincount(context_range, minlength=N_RANGES)
        is_far = (position > self.window) & (2 * context >= self.window)
        documents, document_of = np.unique(document[is_far], return_inverse=True)
        self.far_nats[documents] += np.bincount(document_of, losses[is_far])
        self.far_tokens[documents] += np.bincount(document_of)

    @property
    def tokens(self) -> Int[np.ndarray, "D P"]:
        """Number of tokens of each document in each range of positions."""
        until = np.minimum(self.documents.lengths[:, None], np.append(LAST_POSITIONS, np.iinfo(np.int64).max))
        return np.diff(until, axis=1, prepend=0)

    @property
    def loss(self) -> float:
        """Nats per token."""
        return float(self.nats.sum() / self.documents.lengths.sum())


# ---- measuring -----------------------------------------------------------------------------------


def measure_windows(
    model: ModelConfig, params: Params, mesh: Mesh, documents: Documents, window: int, batch_size: int
) -> DocumentLosses:
    """Predict all tokens in windows of so many tokens, in batches of `batch_size`, a multiple of the mesh's parts."""

    @partial(jax.jit, in_shardings=(None, split_batch(mesh)), out_shardings=replicated(mesh))
    def step(params: Params, batch: dict[str, jax.Array]) -> jax.Array:
        # The mask is 1 up to the end of each row's tokens, and what follows is padding.
        return window_losses(model, params, batch["tokens"], mesh, batch["mask"].sum(axis=-1))

    losses, start = DocumentLosses(documents, window, model.document_token is not None), 0
    batches = EvaluationBatches(documents.dataset, window, batch_size)
    for batch in _track(batches, f"{documents.dataset.path}, windows"):
        # Fetching each batch's losses keeps simulated devices from deadlocking, and bounds the queue on real ones.
        batch_losses, mask = np.asarray(step(params, place_batch(mesh, batch))), batch["mask"]
        losses.add(np.arange(start, start + mask.size)[mask.reshape(-1)], batch_losses[mask])
        start += mask.size
    return losses


def measure_streaming(
    model: ModelConfig, params: Params, mesh: Mesh, documents: Documents, window: int, batch_size: int
) -> DocumentLosses:
    """Predict all tokens with documents read whole, window by window. Raises ValueError if one has too many tokens."""

    @partial(jax.jit, in_shardings=(None, split_batch(mesh), None), out_shardings=(replicated(mesh), None))
    def step(params: Params, batch: dict[str, jax.Array], state: ModelState) -> tuple[jax.Array, ModelState]:
        state = forget(model, state, batch["begins"])
        return next_token_losses_with_state(model, params, batch["tokens"], state, mesh)

    losses, longest = DocumentLosses(documents, window, model.document_token is not None), int(documents.lengths.max())
    lanes = min(batch_size, round_up(len(documents), n_batch_parts(mesh)))
    check_room(model, longest)
    state = init_model_state(model, lanes, longest)  # caches, where an attention kind has them, hold a document
    batches = DocumentBatches(documents, window, lanes, mesh.shape["sequence"] * mesh.shape["tensor"])
    for batch in _track(batches, f"{documents.dataset.path}, streaming"):
        mask, first = batch["mask"], batch["first"]
        placed = place_batch(mesh, {name: batch[name] for name in ("tokens", "begins")})
        batch_losses, state = step(params, placed, state)
        index = first[:, None] + np.arange(mask.shape[1])
        losses.add(index[mask], np.asarray(batch_losses)[mask])
    return losses


def _track(batches: Any, label: str) -> Iterator[Batch]:
    return track(batches, label, batches.n_tokens, lambda batch: int(batch["mask"].sum()), "tokens")


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
