"""The chunked form on one page: the tutorial to `chunk`, `schedule` and `repair`, and an oracle for their tests.

    log y = log S - log Z,   S[t] = sum_k exp(q[t,k]) sum_{s<=t} exp(k[s,k]) v[s],   Z[t] = the same with v = 1

A chunk of C tokens at a time: a query reads its own chunk by a masked C x C product, and everything before it from a
K x V matrix of sums. Cost and memory are linear in T. Three things are left out here, and only here:

  * groups of chunks, and every other trick that makes XLA run this fast (`schedule`);
  * the backward pass by hand: `jax.grad` of this page is right, but saves every intermediate result (`chunk`);
  * exactness at every dynamic range: where the exponents of a chunk spread over more than some 60 nats, terms that
    matter underflow (`values.SMALLEST_SUM`, `repair`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from heinsen.ops.states import LogState


def log_attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch T K"],
    log_v: Float[Array, "*batch T V"],
    chunk_size: int = 64,
) -> tuple[Float[Array, "*batch T V"], LogState]:
    """(log y, the state after all tokens) of causal attention over finite queries, keys and log values."""
    # The sums of all tokens before the chunk, relative to the largest exponents so far: c of keys, b of log values.
    *batch, d_key, d_value = *k.shape[:-2], k.shape[-1], log_v.shape[-1]
    m_s, m_z = jnp.zeros((*batch, d_key, d_value)), jnp.zeros((*batch, d_key))
    c, b = jnp.full((*batch, d_key), -jnp.inf), jnp.full((*batch, d_value), -jnp.inf)
    log_y = []
    for start in range(0, q.shape[-2], chunk_size):
        q_c, k_c, log_v_c = (x[..., start : start + chunk_size, :] for x in (q, k, log_v))

        # 1. Raise the shifts so that they cover the chunk, and scale the sums down by as much: exp(old - new) <= 1.
        c_old, b_old = c, b
        c, b = jnp.maximum(c, k_c.max(axis=-2)), jnp.maximum(b, log_v_c.max(axis=-2))
        m_z = m_z * jnp.exp(c_old - c)
        m_s = m_s * jnp.exp(c_old - c)[..., :, None] * jnp.exp(b_old - b)[..., None, :]

        # 2. Factors, all at most 1. A query has a shift r of its own, which cancels in S / Z.
        r = (q_c + c[..., None, :]).max(axis=-1, keepdims=True)
        qf = jnp.exp(q_c + c[..., None, :] - r)  # [*batch, C, K]
        kf = jnp.exp(k_c - c[..., None, :])  # [*batch, C, K]
        vf = jnp.exp(log_v_c - b[..., None, :])  # [*batch, C, V]

        # 3. Queries read their own chunk, up to themselves, and the sums of all tokens before it.
        a = jnp.tril(qf @ kf.mT)  # [*batch, C, C]
        s = a @ vf + qf @ m_s
        z = a.sum(axis=-1) + (qf @ m_z[..., None])[..., 0]
        log_y.append(jnp.log(s) - jnp.log(z)[..., None] + b[..., None, :])

        # 4. The chunk joins the sums.
        m_s = m_s + kf.mT @ vf
        m_z = m_z + kf.sum(axis=-2)
    state = LogState(jnp.log(m_s) + c[..., :, None] + b[..., None, :], jnp.log(m_z) + c)
    return jnp.concatenate(log_y, axis=-2), state
