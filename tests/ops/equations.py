"""Equations (1) to (4) of the paper, literally, without states, values of either sign by complex logarithms.

Axes: `*batch` any leading axes; T queries, S keys; K key and V value features.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Complex, Float, Inexact

from heinsen.logspace import NEG_INF, finite, log_matmul, logsumexp


def equation_1(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch S K"],
    v: Float[Array, "*batch S V"],
    *,
    c: float | Float[Array, ""] = 0.0,
    mask: Bool[Array, "*#batch T S"] | None = None,
) -> Float[Array, "*batch T V"]:
    """Eq. (1): Softmax(log(exp(Q) exp(K)^T / exp(c))) V, with `mask` true where a query sees a key."""
    logits = log_matmul(q, jnp.swapaxes(k, -1, -2)) - c
    if mask is not None:
        logits = jnp.where(mask, logits, NEG_INF)
    return jnp.matmul(jax.nn.softmax(logits, axis=-1), v, precision=jax.lax.Precision.HIGHEST)


def equation_2(log_s: Inexact[Array, "*batch T V"], log_z: Float[Array, "*batch T"]) -> Float[Array, "*batch T V"]:
    """Eq. (2): exp(log S - log Z), real even where log S is complex."""
    return jnp.exp(log_s - log_z[..., None]).real


def equation_3(
    q: Float[Array, "*batch T K"], k: Float[Array, "*batch S K"], log_v: Inexact[Array, "*batch S V"]
) -> tuple[Inexact[Array, "*batch T V"], Float[Array, "*batch T"]]:
    """Eq. (3): log S and log Z over all keys; log S is complex if log V is."""
    h_s = _lse(k[..., :, None] + log_v[..., None, :], axis=-3)
    h_z = _lse(k, axis=-2)
    return _lse(q[..., None] + h_s[..., None, :, :], axis=-2), _lse(q + h_z[..., None, :], axis=-1)


def equation_4(
    q: Float[Array, "*batch T K"], k: Float[Array, "*batch T K"], log_v: Inexact[Array, "*batch T V"]
) -> tuple[Inexact[Array, "*batch T V"], Float[Array, "*batch T"]]:
    """Eq. (4): log S and log Z of each query over the keys up to its own, in T*T*K*V memory."""
    n_tokens = q.shape[-2]
    mask = jnp.tril(jnp.ones((n_tokens, n_tokens), bool))
    k_prefixes = jnp.where(mask[..., None], k[..., None, :, :], NEG_INF)
    h_s = _lse(k_prefixes[..., None] + log_v[..., None, :, None, :], axis=-3)
    h_z = _lse(k_prefixes, axis=-2)
    return _lse(q[..., None] + h_s, axis=-2), _lse(q + h_z, axis=-1)


def _lse(x: Array, axis: int) -> Array:
    return complex_logsumexp(x, axis) if jnp.iscomplexobj(x) else logsumexp(x, axis)


def complex_log(x: Float[Array, "*shape"]) -> Complex[Array, "*shape"]:
    """log x for real x of either sign: log|x| + i*pi where x < 0 (the paper's complex logarithms, section 1.2)."""
    magnitude = jnp.log(jnp.abs(x))
    return jax.lax.complex(magnitude, jnp.where(x < 0, jnp.pi, 0.0).astype(magnitude.dtype))


def complex_logsumexp(z: Complex[Array, "..."], axis: int = -1) -> Complex[Array, "..."]:
    """log-sum-exp of complex logarithms, shifted by the largest real part; the terms may cancel."""
    top = jnp.max(z.real, axis=axis, keepdims=True)
    shift = finite(top)
    return jnp.squeeze(shift, axis) + jnp.log(jnp.sum(jnp.exp(z - shift), axis=axis))
