"""Packed documents: segment ids to the masks, resets and ranges that each form of attention needs.

A document is a run of equal segment ids. `starts` marks the first token of every document but the one that the
sequence begins in, which may continue the document of an incoming state.

Axes: `*batch` is any leading axes; T tokens; C tokens of a chunk.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


def document_starts(segment_ids: Int[Array, "*batch T"]) -> Bool[Array, "*batch T"]:
    """True where the id differs from that of the token before; false at token 0."""
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    return jnp.pad(changes, [(0, 0)] * (changes.ndim - 1) + [(1, 0)])


def document_numbers(starts: Bool[Array, "*batch T"]) -> Int[Array, "*batch T"]:
    """Number each document of a sequence from 0, the one that the sequence begins in."""
    return jnp.cumsum(starts, axis=-1)


def document_ends(starts: Bool[Array, "*batch T"]) -> Bool[Array, "*batch T"]:
    """True at the last token of every document, the sequence's last token included."""
    return jnp.concatenate([starts[..., 1:], jnp.ones_like(starts[..., :1])], axis=-1)


def last_tokens(starts: Bool[Array, "*batch T"]) -> Int[Array, "*batch T"]:
    """For each token, the position of the last token of its document."""
    n_tokens = starts.shape[-1]
    end = jnp.where(document_ends(starts), jnp.arange(n_tokens), n_tokens)
    return lax.cummin(end, axis=starts.ndim - 1, reverse=True)


def document_ranges(starts: Bool[Array, "*batch T"]) -> tuple[Int[Array, "*batch T"], Int[Array, "*batch T"]]:
    """For each token, the position of its document's first token and one past that of its last."""
    first = lax.cummax(jnp.where(starts, jnp.arange(starts.shape[-1]), 0), axis=starts.ndim - 1)
    return first, last_tokens(starts) + 1


def mask_cross_document(starts: Bool[Array, "*batch T"]) -> Bool[Array, "*batch T T"]:
    """True for pairs (query, key) of the same document."""
    document = document_numbers(starts)
    return document[..., :, None] == document[..., None, :]


def starts_of_documents(segment_ids: Array | None, k: Array) -> Array | None:
    """Where a document starts, for each of the keys k [*batch, T, K]."""
    return None if segment_ids is None else jnp.broadcast_to(document_starts(segment_ids), k.shape[:-1])
