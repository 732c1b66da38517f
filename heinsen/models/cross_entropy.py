"""Cross-entropy of tokens, in nats, from the last hidden states. The logits of all tokens are never in memory at once.

    loss[t] = LSE_v(x[t] . e[v]) - x[t] . e[target[t]]

The gradient with respect to the logits, softmax - one_hot, is known while the loss is computed, so `weighted_loss`
computes its two products right then: nothing is computed twice, and the residuals have the sizes of x and of the
embedding.

On a mesh each device takes a share of the batch and of the tokens, which are divided over the axis `tensor` too, and
the whole embedding, whose gradient is summed over all devices once.

Axes: B batch, T tokens, D d_model; `vocab` rows of the embedding, all of which take part in the softmax.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from heinsen import backend
from heinsen.parallel import AXES, BATCH, on_each_device
from heinsen.promotion import usual_promotion

_TOKENS = P(BATCH, ("sequence", "tensor"))  # [B, T, ...]


def cross_entropy(
    logits: Float[Array | np.ndarray, "*shape vocab"], targets: Int[Array | np.ndarray, "*shape"]
) -> Float[Array, "*shape"]:
    """Return the negative log-likelihood of each target."""
    # A masked sum rather than a gather, whose gradient would scatter into one more array of the logits' size.
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)


def token_logits(
    x: Float[Array, "B T D"], embedding: Float[Array | np.ndarray, "vocab D"], dtype: str
) -> Float[Array, "B T vocab"]:
    """Return x . e[v] for every token, with inputs in `dtype`, accumulated in float32 at least."""
    accumulator = jnp.promote_types(dtype, jnp.float32)
    return jnp.einsum("btd,vd->btv", x.astype(dtype), embedding.astype(dtype), preferred_element_type=accumulator)


def token_losses(
    x: Float[Array | np.ndarray, "B T D"],
    embedding: Float[Array | np.ndarray, "vocab D"],
    targets: Int[Array | np.ndarray, "B T"],
    dtype: str,
    mesh: Mesh | None = None,
) -> Float[Array, "B T"]:
    """Return the negative log-likelihood of each target, from `token_logits`."""
    losses: Callable[..., Array] = partial(_token_losses, dtype=dtype)
    if mesh is not None and mesh.size > 1:
        losses = on_each_device(mesh, losses, in_specs=(_TOKENS, P(), _TOKENS), out_specs=_TOKENS)
    return losses(*map(jnp.asarray, (x, embedding, targets)))


def _token_losses(x: Array, embedding: Array, targets: Array, dtype: str) -> Array:
    def step(_: None, chunk: tuple[Array, Array]) -> tuple[None, Array]:
        x, targets = chunk
        return None, cross_entropy(token_logits(x, embedding, dtype), targets)

    return _over_chunks(step, None, (x, targets), len(embedding))[1]


def weighted_loss(
    x: Float[Array | np.ndarray, "B T D"],
    embedding: Float[Array | np.ndarray, "vocab D"],
    targets: Int[Array | np.ndarray, "B T"],
    weights: Float[Array | np.ndarray, "B T"],
    dtype: str,
    mesh: Mesh | None = None,
) -> Float[Array, ""]:
    """Return the sum of `token_losses` times `weights`."""
    arrays = tuple(map(jnp.asarray, (x, embedding, targets, weights)))
    if mesh is None or mesh.size == 1:
        return _weighted_loss(*arrays, dtype)
    on_device = lambda *arrays: _weighted_loss(*arrays, dtype)[None]
    specs = _TOKENS, P(), _TOKENS, _TOKENS
    return jnp.sum(on_each_device(mesh, on_device, in_specs=specs, out_specs=P(AXES))(*arrays))


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _weighted_loss(x: Array, embedding: Array, targets: Array, weights: Array, dtype: str) -> Array:
    return jnp.sum(weights * _token_losses(x, embedding, targets, dtype))


Residuals = tuple[Array, Array, Array]  # gradients with respect to x and the embedding; losses


@usual_promotion
def _forward(x: Array, embedding: Array, targets: Array, weights: Array, dtype: str) -> tuple[Array, Residuals]:
    def step(dembedding: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        x, targets, weights = chunk
        logits = token_logits(x, embedding, dtype)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        dlogits = jnp.exp(logits - log_z[..., None]) - _is_target(logits, targets)
        dlogits = (dlogits * weights[..., None]).astype(dtype)
        losses = log_z - jnp.sum(x.astype(dtype) * embedding[targets].astype(dtype), axis=-1, dtype=logits.dtype)
        product = partial(jnp.einsum, preferred_element_type=logits.dtype)
        dx = product("btv,vd->btd", dlogits, embedding.astype(dtype))
        return dembedding + product("btv,btd->vd", dlogits, x.astype(dtype)), (losses, dx)

    arrays = x, targets, weights
    dembedding, (losses, dx) = _over_chunks(step, jnp.zeros_like(embedding), arrays, len(embedding))
    return jnp.sum(weights * losses), (dx.astype(x.dtype), dembedding, losses)


@usual_promotion
def _backward(dtype: str, residuals: Residuals, g: Array) -> tuple[Array, Array, None, Array]:
    dx, dembedding, losses = residuals
    return g * dx, g * dembedding, None, g * losses


_weighted_loss.defvjp(_forward, _backward)


def _is_target(logits: Array | np.ndarray, targets: Array | np.ndarray) -> Array:
    return jnp.arange(logits.shape[-1]) == targets[..., None]


def max_logits() -> int:
    """Return the number of logits that may be in memory at once."""
    return 2**24 if backend.current() == "cpu" else 2**28


def _over_chunks(
    step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, arrays: tuple[Array, ...], vocab: int
) -> tuple[Any, Any]:
    """Apply `lax.scan` to chunks of the arrays' axis T, padded with zeros."""
    n_batch, n_tokens = arrays[0].shape[:2]
    n_chunks = min(n_tokens, -(-n_batch * n_tokens * vocab // max_logits()))
    size = -(-n_tokens // n_chunks)

    def chunks(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, n_chunks * size - n_tokens)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(n_batch, n_chunks, size, *x.shape[2:]), 1, 0)

    carry, out = jax.lax.scan(step, carry, jax.tree.map(chunks, arrays))
    join = lambda x: jnp.moveaxis(x, 0, 1).reshape(n_batch, n_chunks * size, *x.shape[3:])[:, :n_tokens]
    return carry, jax.tree.map(join, out)
