"""The chunked form on one page: the tutorial to `chunk`, `schedule` and `exact`, and an oracle for their tests.

    log y = log S - log Z,   S[t] = sum_k exp(q[t,k]) sum_{s<=t} exp(k[s,k]) v[s],   Z[t] = the same with v = 1

A chunk of C tokens at a time: a query reads its own chunk by a masked C x C product, and everything before it from a
K x V matrix of sums. Cost and memory are linear in T. With a forget gate, token r multiplies the weights of all tokens
before it by exp(log_decay[r]). Four things are left out here, and only here:

  * groups of chunks, and every other trick that makes XLA run this fast (`schedule`);
  * the backward pass by hand: `jax.grad` of this page is right, but saves every intermediate result (`chunk`);
  * document starts, and sums of log decays of very different size without their rounding (`decay`);
  * exactness at every dynamic range: where the exponents of a chunk spread over more than some 60 nats, terms that
    matter underflow (`values.SMALLEST_SUM`, `exact`).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from heinsen.ops.states import LogState


def log_attention(
    q: Float[Array, "*batch T K"],
    k: Float[Array, "*batch T K"],
    log_v: Float[Array, "*batch T V"],
    chunk_size: int = 64,
    log_decay: Float[Array, "*batch T"] | None = None,
) -> tuple[Float[Array, "*batch T V"], LogState]:
    """(log y, the state after all tokens) of causal attention over finite queries, keys, log values and log decays."""
    log_decay = jnp.zeros(k.shape[:-1]) if log_decay is None else log_decay
    # The sums of all tokens before the chunk, relative to the shifts c of keys and b of log values.
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

        # 3. What the forget gate leaves, by sums of log decays: of key s at query t, and of the sums at query t.
        g = jnp.cumsum(log_decay[..., start : start + chunk_size], axis=-1)  # [*batch, C]
        visible = jnp.tril(jnp.ones((g.shape[-1],) * 2, bool))
        left = jnp.exp(jnp.where(visible, g[..., :, None] - g[..., None, :], -jnp.inf))  # [*batch, C, C]

        # 4. Queries read their own chunk, up to themselves, and the sums of all tokens before it.
        a = (qf @ kf.mT) * left  # [*batch, C, C]
        qf = qf * jnp.exp(g)[..., None]
        s = a @ vf + qf @ m_s
        z = a.sum(axis=-1) + (qf @ m_z[..., None])[..., 0]
        log_y.append(jnp.log(s) - jnp.log(z)[..., None] + b[..., None, :])

        # 5. The chunk joins the sums, as far as it is left at its end. There the shift of keys may fall.
        g_end = g[..., -1:]  # [*batch, 1]
        k_end = k_c + (g_end - g)[..., None]  # [*batch, C, K]
        c_old, c = c, jnp.maximum(c + g_end, k_end.max(axis=-2))
        kf, kept = jnp.exp(k_end - c[..., None, :]), jnp.exp(c_old + g_end - c)
        m_s = m_s * kept[..., None] + kf.mT @ vf
        m_z = m_z * kept + kf.sum(axis=-2)
    state = LogState(jnp.log(m_s) + c[..., :, None] + b[..., None, :], jnp.log(m_z) + c)
    return jnp.concatenate(log_y, axis=-2), state
