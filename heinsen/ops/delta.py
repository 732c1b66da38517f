"""The gated delta rule: linear attention that corrects what it remembers of a key instead of adding to it.

    S[t] = exp(log_decay[t]) (I - beta[t] k[t] k[t]^T) S[t-1] + beta[t] k[t] v[t]^T,   y[t] = S[t]^T q[t]

(Yang, Kautz & Hatamizadeh, 2024, arXiv:2412.06464.) With a unit key, S[t] answers k[t] with a share beta[t] of v[t] and
1 - beta[t] of what it answered before. What token t adds is k[t] u[t]^T with the correction u[t] = beta[t] (v[t] -
exp(log_decay[t]) S[t-1]^T k[t]). In a chunk, where exp(G[t] - G[s]) is left of token s at token t and exp(G[t]) of the
state S before the chunk, the corrections are the rows of U in a triangular system:

    (I + A) U = diag(beta) (V - diag(exp(G)) K S),   A[t, s] = beta[t] exp(G[t] - G[s]) k[t] . k[s]     for s < t

U is affine in S, and so is the state after the chunk. Tokens are processed in chunks of C: a scan of products with
K x K matrices gives the state before each chunk, and all else is computed for all chunks at once. Memory is linear in
T.

Axes: `*batch` any leading axes; T tokens; K key and V value features; N chunks of C tokens.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from heinsen.ops.arrays import einsum, on_automatic_axes, promote, to_chunks, vary_together
from heinsen.ops.checks import (
    check_decay,
    check_fits,
    check_float,
    check_inputs,
    check_known_tokens,
    check_per_token,
    check_state,
)
from heinsen.ops.decay import ChunkDecay, with_starts
from heinsen.ops.segments import starts_of_documents
from heinsen.promotion import usual_promotion

_BLOCK = 8  # tokens


class DeltaState(NamedTuple):
    """S, which answers a key with a value, in float32 or wider."""

    memory: Float[Array, "*batch K V"]


def init_delta_state(
    batch_shape: tuple[int, ...], d_key: int, d_value: int, dtype: DTypeLike = jnp.float32
) -> DeltaState:
    """State before any token. Raises TypeError for a dtype that is not floating point."""
    check_float("the state", dtype)
    return DeltaState(jnp.zeros((*batch_shape, d_key, d_value), dtype))


@usual_promotion
def delta_rule(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch T K"],
    v: Float[Array, "*batch T V"],
    beta: Float[Array, "*batch T"],
    *,
    log_decay: Float[Array, "*batch T"] | None = None,
    state: DeltaState | None = None,
    segment_ids: Int[Array, "*#batch T"] | None = None,
) -> tuple[Float[Array, "*batch T V"], DeltaState]:
    """(y [*batch, T, V], the state after all tokens) of the gated delta rule, causal.

    Args:
      q, k, v: queries, keys and values of either sign. Keys have a norm of at most 1: where beta |k|^2 goes beyond 2,
        the state grows without bound.
      beta: from 0 to 1, how much of the value a token writes; 0 leaves the state as it is.
      log_decay: as in `heinsen.log_attention`: token t multiplies the state before it by exp(log_decay[t]) <= 1.
      state: S before the first token, visible to all queries of the first document.
      segment_ids: packed documents. Tokens see each other only within a run of equal ids. `state` continues into the
        first run, and the returned state is that of the last run.

    Computes in float32, or float64 for float64 inputs; y has v's dtype. A value that is not finite reaches all queries
    of its chunk and later ones.

    Raises TypeError for dtypes that are not floating point, ValueError for shapes that do not match.
    """
    check_inputs(q, k, v, True, segment_ids, "v")
    check_decay("log_decay", log_decay, k, True)
    out_dtype, (q, k, v) = v.dtype, promote(q, k, v)
    log_decay = with_starts(log_decay, starts_of_documents(segment_ids, k), k)
    check_per_token("beta", beta, k)
    check_known_tokens(q.shape[-2])
    if state is None:
        state = init_delta_state(k.shape[:-2], k.shape[-1], v.shape[-1], v.dtype)
    check_state("state", state, DeltaState)
    check_fits(state, ((*k.shape[:-2], k.shape[-1], v.shape[-1]),), k, v)
    initial = state.memory.astype(v.dtype)
    y, final = on_automatic_axes(_attend, q, k, v, beta.astype(v.dtype), initial, log_decay)
    return y.astype(out_dtype), DeltaState(final)


@jax.jit
def _attend(q: Array, k: Array, v: Array, beta: Array, initial: Array, log_decay: Array | None) -> tuple[Array, Array]:
    """The outputs and S after all tokens. Jitted: see `chunked`."""
    arguments = vary_together(q, k, v, beta, initial, log_decay)
    run = _one_token if q.shape[-2] == 1 else _in_chunks
    return run(*arguments)


def _one_token(
    q: Array, k: Array, v: Array, beta: Array, memory: Array, log_decay: Array | None
) -> tuple[Array, Array]:
    """The recurrence itself."""
    if log_decay is not None:
        decay = jnp.exp(log_decay)[..., None]
        memory = jnp.where(decay > 0, memory, 0.0) * decay
    corrections = beta[..., None] * (v - einsum("...tk,...kv->...tv", k, memory))
    memory = memory + einsum("...tk,...tv->...kv", k, corrections)
    return einsum("...tk,...kv->...tv", q, memory), memory


def choose_chunk(n_tokens: int, d_key: int) -> int:
    """Tokens of a chunk, a power of two: fewer are faster with few features (CPU).

    Not 16: gradients of many rows then end the process with jax 0.10.2 on CPUs.
    """
    return 32 if min(n_tokens, 2 * d_key) <= 32 else 64


def _in_chunks(
    q: Array, k: Array, v: Array, beta: Array, initial: Array, log_decay: Array | None
) -> tuple[Array, Array]:
    """Chunk by chunk. Tokens that fill up the last one write nothing."""
    n_tokens = q.shape[-2]
    size = choose_chunk(n_tokens, k.shape[-1])
    q, k, v, beta = (to_chunks(x, size, -2) for x in (q, k, v, beta[..., None]))  # [*batch, N, C, ...]
    decays = jnp.zeros(size, q.dtype) if log_decay is None else to_chunks(log_decay, size, -1)  # [*batch, N, C]
    decay = ChunkDecay.of(decays, math.gcd(size, _BLOCK))
    between, kept = decay.key_factors, jnp.exp(decay.before_at_end)[..., None, None]
    of_before, until_end = (jnp.exp(x)[..., None] for x in (decay.before_at_queries, decay.keys_at_end))

    # Corrections are `own` where the state before the chunk is 0, and else less by `answers` times it.
    across = jnp.tril(beta * between * einsum("...tk,...sk->...ts", k, k), -1)
    solved = _solve(across, beta * jnp.concatenate([v, of_before * k], axis=-1))
    own, answers = jnp.split(solved, [v.shape[-1]], axis=-1)
    last_k = until_end * k
    transition = kept * jnp.eye(k.shape[-1], dtype=k.dtype) - einsum("...sk,...sj->...kj", last_k, answers)
    added = einsum("...sk,...sv->...kv", last_k, own)

    def step(memory: Array, chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        transition, added = chunk
        return einsum("...kj,...jv->...kv", transition, memory) + added, memory

    final, before = lax.scan(step, initial, (jnp.moveaxis(transition, -3, 0), jnp.moveaxis(added, -3, 0)))
    before = jnp.moveaxis(before, 0, -3)  # [*batch, N, K, V]
    corrections = own - einsum("...tk,...kv->...tv", answers, before)
    weights = between * einsum("...tk,...sk->...ts", q, k)
    y = einsum("...ts,...sv->...tv", weights, corrections)
    y = y + einsum("...tk,...kv->...tv", of_before * q, before)
    return y.reshape(*y.shape[:-3], -1, y.shape[-1])[..., :n_tokens, :], final


@jax.custom_jvp
def _solve(a: Array, b: Array) -> Array:
    """x with (I + a) x = b, for strictly lower triangular a [*batch, C, C] and b [*batch, C, F]."""
    return einsum("...ts,...sf->...tf", _inverse(a), b)


@_solve.defjvp
@usual_promotion
def _solve_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    """From (I + a) dx = db - da x, without derivatives of the inverse."""
    (a, b), (da, db) = primals, tangents
    inverse = _inverse(a)
    x = einsum("...ts,...sf->...tf", inverse, b)
    return x, einsum("...ts,...sf->...tf", inverse, db - einsum("...ts,...sf->...tf", da, x))


def _inverse(a: Array) -> Array:
    """(I + a)^-1 for strictly lower triangular a [*batch, C, C], C a power of two: from the inverses of its halves.

    As in forward substitution, all intermediate results are answers of the delta rule, at most 1 with keys of norm 1.
    Powers of a would be binomial coefficients where keys are alike.
    """
    size = a.shape[-1]
    if size <= 2:
        return jnp.eye(size, dtype=a.dtype) - a
    half = size // 2
    halves = jnp.stack([a[..., :half, :half], a[..., half:, half:]])
    # With axes of batches in one, as XLA's CPU library ends the process at a rank of 8.
    first, second = _inverse(halves.reshape(-1, half, half)).reshape(halves.shape)
    below = -einsum("...ts,...sr,...rq->...tq", second, a[..., half:, :half], first)
    above = jnp.zeros_like(below)
    return jnp.concatenate([jnp.concatenate(x, axis=-1) for x in ((first, above), (below, second))], axis=-2)
